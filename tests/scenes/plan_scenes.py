"""Make calls of a plan from calls of the operators."""

from kvkit.dynamic_batching import plan

STEPS = ("seqstarts", "kvstarts", "cachestarts", "start_pos")
TOKENS = ("query", "current_key", "current_value")
PLANNED = ("cache_mode", "page_size")
CACHED = ("num_layer", "layer_idx", "quant_bit", "quant_group", "cache_layout")


def planned(call, **more):
    """Return the plan of a call."""
    options = {name: call.attributes[name] for name in PLANNED}
    hints = {name: call[name] for name in ("max_seqlen", "max_kvlen")}
    steps = [call[name] for name in STEPS]
    return plan(*steps, call["decoding_batches"], **hints, **{**options, **more})


def attend(step, call, **more):
    """Run a plan with the arguments of a call that a plan does not have."""
    attrs = {name: value for name, value in call.attributes.items() if name not in PLANNED}
    arrays = [call[name] for name in (*TOKENS, "cache", "scale", "attn_mask")]
    return step.multi_head_cache_attention(*arrays, **{**attrs, **more})


def append(step, call, **more):
    attrs = {name: call.attributes[name] for name in CACHED}
    arrays = [call[name] for name in ("current_key", "current_value", "cache", "scale")]
    return step.key_value_cache(*arrays, **{**attrs, **more})


def run_by_plan(call, **more):
    """Run a call of an operator by a plan of its index tensors."""
    given, names = (
        call.inputs | call.attributes | more,
        (*STEPS, "decoding_batches", "max_seqlen", "max_kvlen", *PLANNED),
    )
    step = plan(**{name: given.pop(name) for name in names if name in given})
    return getattr(step, call.name.rpartition(".")[2])(**given)
