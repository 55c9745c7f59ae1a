"""A call of attention as the kernels see it: one record of addresses, strides, counts and machine code."""

from kvkit.cpu.records import Record

TASK = Record(
    "counters batch seqstarts kvstarts table value_table table_row page_size",
    "decoding causal alibi left right",
    "keys key_sequence key_row key_step key_head key_element key_cells cell_sequence cell_row cell_head",
    "values value_sequence value_row value_step value_head value_element value_cells own_places",
    "query query_sequence query_token query_head out out_sequence out_token out_head",
    "lse lse_sequence lse_token lse_head sinks apart cap cap_at",
    "key_scales value_scales scale_sequence scale_head slopes slopes_sequence",
    "mask mask_kind mask_sequence mask_head mask_row mask_column mask_packed",
    "heads group dim value_dim padded_dim padded_value_dim key_bytes value_bytes cell_bytes",
    "orders together widens block lead wide_block least_part most_parts unit_tiles",
    "part_tokens units items parts tiles products",
    "rounds key_to_float value_to_float query_to_float float_to_out",
    "scores1 scores2 scores4 scores8 scores32 sums1 sums2 sums4 sums8 sums32",
    "integer_queries integer_keys integer_values integer_scores integer_sums",
    "integers queries1 queries2 queries4 queries8",
    "pairs pair_rows pair_values pair_scores pair_sums copy_row",
    "partials part_bytes counting scratch scratch_bytes",
    "numbers scores factor top total queries query_pairs query_integers sums wide_keys wide_values lines",
)
