"""Run any operator on the device.

The arrays of a call are checked first, so that an error costs no copy. Host arrays are copied to the device,
and the call is checked again with the addresses of the copies. Then launches are prepared and run, and
results that belong to the host are copied back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkit.checks.arguments import StepArguments
from kvkit.checks.index_tensors import VALIDATES
from kvkit.operators import OPERATORS
from kvkit.operators.operator import IN_PYTHON
from kvkit.runtime import call_log
from kvkit_cuda import prompts, recurrent
from kvkit_cuda.calls import arrays, checks, homes, latent, launches, prepared, results, steps
from kvkit_cuda.device_runtime import host
from kvkit_cuda.names import inputs


@dataclass(frozen=True, slots=True)
class Kind:
    """The execution of a group of operators.

    `launches` returns the launches of a checked call whose arrays are on the device. Arrays named in
    `contiguous` need a contiguous last axis there. `unused` returns the names of arrays that a call does not
    use, `host_only` of those whose elements the host reads. `operand` returns the operand of an array.
    """

    launches: Callable
    contiguous: tuple[str, ...] = ()
    unused: Callable = lambda call: ()
    operand: Callable = arrays.operand
    host_only: Callable = lambda operands, values: ()


def no_scale(call):
    """Return the name of the scale if a call does not use it."""
    return () if call.layer and call.layer.scale_format else ("scale",)


def numbers_of_heads(operands, values):
    """Return the names of per-head numbers, which stay on the host; scales of tokens are on the device."""
    return "alibi_slopes", *scales_of_heads(operands, values)


def scales_of_heads(operands, values):
    """Return the names of per-head scales, whose shape does not begin like a pool's."""
    pools = {getattr(operands[name].seen, "shape", ())[:-1] for name in ("key_cache", "value_cache")}
    shapes = {name: getattr(operands[name].seen, "shape", ()) for name in ("key_scale", "value_scale")}
    return tuple(
        name
        for name, shape in shapes.items()
        if len(shape) < 3 and not any(len(pool) > 1 and shape[: len(pool)] == pool for pool in pools)
    )


def scale_of_heads(operands, values):
    """Return the name of per-head scales, if the call has any; scales of tokens have a cache's axes."""
    scale = operands["scale"].seen if "scale" in operands else None
    return ("scale",) if isinstance(scale, np.ndarray) and scale.ndim < 3 else ()


NEW = "current_key", "current_value"
APPEND = Kind(launches.append, NEW, no_scale, host_only=scale_of_heads)
ATTEND = Kind(launches.attend, ("query", "key", "value", *NEW), no_scale, host_only=scale_of_heads)
MERGE = Kind(launches.merge_parts, operand=arrays.operands)
ROTATE = Kind(launches.rotate, ("query", "key"))
MASK = Kind(launches.mask, ("attn_mask",))
SLOPE = Kind(launches.slope)
POSITION_INDEX = Kind(launches.position_index, unused=lambda call: ("sequences",))
ATTEND_TO_PAGES = Kind(launches.attend, ("query",), host_only=numbers_of_heads)
APPEND_TO_PAGES = Kind(launches.append_to_pools, ("key", "value"), host_only=scales_of_heads)
COPY = Kind(launches.copy_blocks)
ATTEND_TO_BLOCKS = Kind(launches.attend_to_blocks)
ATTEND_TO_ROWS = Kind(latent.attend, ("query",), operand=latent.operand, host_only=latent.host_only)
APPEND_ROWS = Kind(latent.append, host_only=lambda operands, values: ("latent", "rope"))
STEP_STATES = Kind(recurrent.launches, ("q", "k", "v"))
RUN_PROMPTS = Kind(prompts.launches, ("q", "k", "v"))  # returns the states, too
COMPUTED = Kind(latent.copy_computed, host_only=lambda operands, values: tuple(operands))

KINDS = {  # other operators are `COMPUTED`
    "key_value_cache": APPEND, "multi_head_attention": ATTEND, "multi_head_cache_attention": ATTEND,
    "merge_attention_states": MERGE, "paged_attention": ATTEND_TO_PAGES, "paged_append": APPEND_TO_PAGES,
    "swap_blocks": COPY, "mla_attention": ATTEND_TO_ROWS, "mla_append": APPEND_ROWS,
    "gated_delta_step": STEP_STATES, "gated_delta_rule": RUN_PROMPTS,
    "rotary_position_embedding": ROTATE, "alibi_slope": SLOPE, "alibi_mask": MASK,
    "dynamic_batching.key_value_cache": APPEND,
    "dynamic_batching.multi_head_attention": ATTEND, "dynamic_batching.multi_head_cache_attention": ATTEND,
    "dynamic_batching.position_index": POSITION_INDEX,
    "dynamic_batching.rotary_position_embedding": ROTATE, "dynamic_batching.alibi_mask": MASK,
    "ascend.reshape_and_cache": Kind(launches.store_rows), "ascend.block_copy": COPY,
    "ascend.paged_cache_load": Kind(launches.load_rows), "ascend.paged_attention": ATTEND_TO_BLOCKS,
    "ascend.nd_to_nz": Kind(launches.group_columns), "ascend.nz_to_nd": Kind(launches.join_columns),
}  # fmt: skip


def call(path, values):
    """Call an operator or a plan's method by its path, with all arguments by name."""
    host.require()
    if call_log.level:
        log(path, values)
    stream, step, repeatable = values["stream"], None, None
    op, method = prepared.operator_of(path), prepared.plan_method(path)
    if method is not None:
        step = values["self"].step
        repeatable = prepared.repeatable(path, method, values) if host.NATIVE else None
        known = step.calls.get(repeatable.form) if repeatable else None
        returned = known and known.run(repeatable, step.needed, stream)
        if returned is not None:
            returned = returned or [values[each.name] for each in OPERATORS[op].inputs if each.inout]
            return tuple(returned) if len(returned) > 1 else returned[0]
    home = homes.of_call({name: value for name, value in values.items() if name not in ("self", "stream")})
    with host.using(home.device):
        host.require_device(host.current())
        named = home.stream if stream is None else stream
        stream = host.stream(named)
        if path == "dynamic_batching.plan":
            own = {name: values[name] for name in ("check", "into")}
            return steps.planned(step_arguments(values), stream, named=named is not None, **own)
        if path == "paged_plan":
            return steps.planned_pages(**values | {"stream": stream}, named=named is not None)
        if "cachestarts" in values:
            tokens = "query" if "query" in values else "current_key"
            step = steps.planned(step_arguments(values), stream, tokens=(tokens, values[tokens]))
        return run(path, step, values, stream, repeatable)


def step_arguments(values):
    """Return the index tensors of packed sequences in a cache."""
    return StepArguments(**{name: values[name] for name in StepArguments._fields if name in values})


def log(path, values):
    """Log a call; arrays of the device are read if KVKIT_LOG asks for numbers."""
    home = homes.of_call(values)
    with host.using(home.device):
        stream = host.stream(home.stream if values["stream"] is None else values["stream"])
        call_log.log_operator(path, values, lambda name, value: arrays.on_host(name, value, stream))


def kind_of(op, values, stream):
    """Return the kind of a call."""
    kind = KINDS.get(op.name, COMPUTED)
    if kind in (STEP_STATES, RUN_PROMPTS):
        seen = {name: arrays.operand(name, values[name], stream).seen for name in inputs(op.name)[0]}
        kernels = recurrent if kind is STEP_STATES else prompts
        if VALIDATES or not kernels.is_ready(seen, values):
            return COMPUTED
    return kind


def run(path, step, values, stream, repeatable=None):
    """Run an operator, with a step if it takes one; keep the prepared call if it is `repeatable`."""
    op, out = OPERATORS[prepared.operator_of(path)], values.get("out")
    kind, (arrays_of, index) = kind_of(op, values, stream), inputs(op.name)
    if step is None:
        index = [*index, *(name for name in IN_PYTHON if name != "out" and name in values)]
        values = values | {name: arrays.on_host(name, values[name], stream) for name in index}

    # Check the arrays where they are.
    given = {name: kind.operand(name, values[name], stream) for name in arrays_of}
    source = next(iter(given.values()), arrays.NOTHING)
    host_only, there_before = kind.host_only(given, values), given.copy()
    given |= {name: given[name].on_host(stream) for name in host_only}
    usable = given | {name: given[name].one_piece(stream) for name in kind.contiguous if name in given}
    seen = {name: operand.seen for name, operand in usable.items()}
    computed = kind is COMPUTED
    call: Any = (
        checks.compute_on_cpu(op, values | seen) if computed else checks.checked(path, values | seen, step)
    )
    changed = tuple(values[each.name] for each in op.inputs if each.inout and not each.keyword)
    made, returned = [], changed if len(changed) > 1 else changed[0] if changed else ()
    if op.outputs:
        usual = sum(not each.only_with for each in op.outputs)
        own = computed and results.computed(op.returned(values), call, values, source, stream)
        made, returned = own or results.outputs(call.results, usual, out, source, stream)

    # Copy those of the host to the device, and check the call with the copies.
    stays = {*kind.unused(call), *host_only, *(name for name in usable if usable[name].seen is None)}
    moved = arrays.moved({name: usable[name] for name in usable if name not in stays}, stream)
    there, copies = usable | moved, [result.moved(stream, contents=False) for result in made]
    copied = [name for name in usable if there[name] is not usable[name]]
    if copied:
        call = checks.checked(path, values | {name: operand.seen for name, operand in there.items()}, step)
    scale = usable["scale"].moved(stream) if "scale" in host_only else None

    ready = launches.DeviceCall(call, [copy.seen for copy in copies], step, stream, scale)
    for name, array in call.changed.items() if computed else ():
        if there_before[name].on_device:
            ready.changed.append((array, there_before[name].seen))
        elif array is not there_before[name].seen:
            np.copyto(there_before[name].seen, array)
    made_launches = kind.launches(ready)
    with prepared.RUNNING:
        for launch in made_launches:  # nothing was written before, and launches cannot fail
            launch()
    pairs = *((there[name], given[name]) for name in there), *zip(copies, made, strict=True)
    in_place = all(operand is other for operand, other in pairs)
    if repeatable and in_place and not repeatable.arrays.keys() & {*host_only}:
        operands = there | {prepared.result(i): copy for i, copy in enumerate(copies)}
        operands = {name: each for name, each in operands.items() if isinstance(each.seen, np.ndarray)}
        forms = list(call.results.forms.values()) if made else []
        memory = step.room(call), step.of(call).tables, ready.owners
        again = prepared.PreparedCall(repeatable.written, made_launches, operands, forms, *memory)
        step.calls.keep(repeatable.form, again)

    # Copy what the call has changed back to arrays of the host.
    for each in op.inputs:
        if each.name in copied and each.changes(usable[each.name].seen):
            usable[each.name].take(there[each.name], stream)
    for result, copy in zip(made, copies, strict=True):
        result.take(copy, stream)
    return (returned, values["state"]) if kind is RUN_PROMPTS else returned
