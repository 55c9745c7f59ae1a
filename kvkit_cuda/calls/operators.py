"""Run any operator on the device.

The arrays of a call are checked first, so that an error costs no copy. Host arrays are copied to the device,
and the call is checked again with the addresses of the copies. Then launches are prepared and run, and
results that belong to the host are copied back.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkit.checks.arguments import StepArguments
from kvkit.operators import OPERATORS
from kvkit.operators.operator import IN_PYTHON
from kvkit.runtime import call_log
from kvkit_cuda.calls import arrays, checks, homes, latent, launches, prepared, results, steps
from kvkit_cuda.calls.checks import fill
from kvkit_cuda.device_runtime import host
from kvkit_cuda.mirror import inputs


@dataclass(frozen=True, slots=True)
class Kind:
    """The execution of a group of operators.

    `launches` returns the launches of a checked call whose arrays are on the device. Arrays named in `rows`
    need a contiguous last axis there. `idle` returns the names of arrays that a call does not use, `read` of
    those that stay on the host because their elements are read there. `take` returns the operand of an array.
    """

    launches: Callable
    rows: tuple[str, ...] = ()
    idle: Callable = lambda call: ()
    take: Callable = arrays.operand
    read: Callable = lambda here, values: ()


def no_scale(call):
    """Return the name of the scale if a call does not use it."""
    return () if call.layer and call.layer.scale_format else ("scale",)


def numbers_of_heads(here, values):
    """Return the names of per-head numbers, which stay on the host; scales of tokens are on the device."""
    return "alibi_slopes", *scales_of_heads(here, values)


def scales_of_heads(here, values):
    """Return the names of per-head scales, whose shape does not begin like a pool's."""
    pools = {getattr(here[name].seen, "shape", ())[:-1] for name in ("key_cache", "value_cache")}
    shapes = {name: getattr(here[name].seen, "shape", ()) for name in ("key_scale", "value_scale")}
    return tuple(
        name
        for name, shape in shapes.items()
        if len(shape) < 3 and not any(len(pool) > 1 and shape[: len(pool)] == pool for pool in pools)
    )


def given_scale(here, values):
    """Return the name of per-head scales, if the call has any; scales of tokens have a cache's axes."""
    scale = here["scale"].seen if "scale" in here else None
    return ("scale",) if isinstance(scale, np.ndarray) and scale.ndim < 3 else ()


NEW = "current_key", "current_value"
APPEND = Kind(launches.append, NEW, no_scale, read=given_scale)
ATTEND = Kind(launches.attend, ("query", "key", "value", *NEW), no_scale, read=given_scale)
MERGE = Kind(launches.merge_parts, take=arrays.operands)
ROTATE = Kind(launches.rotate, ("query", "key"))
MASK = Kind(launches.mask, ("attn_mask",))
SLOPE = Kind(launches.slope)
POSITION_INDEX = Kind(launches.position_index, idle=lambda call: ("sequences",))
ATTEND_TO_PAGES = Kind(launches.attend, ("query",), read=numbers_of_heads)
APPEND_TO_PAGES = Kind(launches.append_to_pools, ("key", "value"), read=scales_of_heads)
MOVE, COPY = Kind(launches.move), Kind(launches.copy_blocks)
ATTEND_TO_BLOCKS = Kind(launches.attend_to_blocks)
ATTEND_TO_ROWS = Kind(latent.attend, ("query",), take=latent.take, read=latent.on_host)
APPEND_ROWS = Kind(latent.append, read=lambda here, values: ("latent", "rope"))
COMPUTED = Kind(latent.copy_computed, read=lambda here, values: tuple(here))

KINDS: dict[checks.Check, Kind] = {  # by the check of an operator
    checks.key_value_cache: APPEND,
    checks.static_attention: ATTEND,
    checks.packed_attention: ATTEND,
    checks.cache_attention: ATTEND,
    checks.merged: MERGE,
    checks.static_rotation: ROTATE,
    checks.packed_rotation: ROTATE,
    checks.slopes: SLOPE,
    checks.static_alibi: MASK,
    checks.packed_alibi: MASK,
    checks.position_index: POSITION_INDEX,
    checks.stored: MOVE,
    checks.loaded: MOVE,
    checks.copied: COPY,
    checks.block_attention: ATTEND_TO_BLOCKS,
    checks.pool_attention: ATTEND_TO_PAGES,
    checks.pool_append: APPEND_TO_PAGES,
    checks.swapped: COPY,
    checks.latent_attention: ATTEND_TO_ROWS,
    checks.latent_append: APPEND_ROWS,
    checks.to_nz: MOVE,
    checks.to_nd: MOVE,
}


def call(path, values):
    """Call an operator or a plan's method by its path, with all arguments by name."""
    host.require()
    if call_log.level:
        log(path, values)
    stream, step, repeated = values["stream"], None, None
    method = prepared.plan_method(path)
    if method is not None:
        step = values["self"].step
        repeated = prepared.repeatable(path, method, values) if host.NATIVE else None
        known = step.calls.get(repeated.form) if repeated else None
        made = known and known.run(repeated, step.needed, stream)
        if made is not None:
            made = made or [
                values[each.name] for each in OPERATORS[prepared.operator_of(path)].inputs if each.inout
            ]
            return tuple(made) if len(made) > 1 else made[0]
    home = homes.of_call({name: value for name, value in values.items() if name not in ("self", "stream")})
    with host.using(home.device):
        host.require_device(host.current())
        named = home.stream if stream is None else stream
        stream = host.stream(named)
        if path == "dynamic_batching.plan":
            own = {name: values[name] for name in ("check", "into")}
            return steps.planned(fill(StepArguments, values), stream, named=named is not None, **own)
        if path == "paged_plan":
            return steps.planned_pages(**values | {"stream": stream}, named=named is not None)
        tokens = checks.new_tokens(values)
        if tokens is not None:
            step = steps.planned(fill(StepArguments, values), stream, tokens=(tokens, values[tokens]))
        return run(OPERATORS[prepared.operator_of(path)], step, values, stream, repeated)


def log(path, values):
    """Log a call; arrays of the device are read if KVKIT_LOG asks for numbers."""
    home = homes.of_call(values)
    with host.using(home.device):
        stream = host.stream(home.stream if values["stream"] is None else values["stream"])
        call_log.log_operator(path, values, lambda name, value: arrays.on_host(name, value, stream))


def run(op, step, values, stream, repeated=None):
    """Run an operator, with a step if it takes one; keep the prepared call if it can be `repeated`."""
    check = checks.CHECKED.get(op.name) or functools.partial(checks.computed, op)
    arrays_of, index = inputs(op.name)
    kind, out, sequences = KINDS.get(check, COMPUTED), values.get("out"), step and step.sequences
    given = {name: values[name] for name in arrays_of}
    if step is None:
        index = [*index, *(name for name in IN_PYTHON if name != "out" and name in values)]
        values = values | {name: arrays.on_host(name, values[name], stream) for name in index}

    here = {name: kind.take(name, array, stream) for name, array in given.items()}
    source = next(iter(here.values()), arrays.NOTHING)
    host_only = kind.read(here, values)
    here |= {name: here[name].on_host(stream) for name in host_only}
    whole = here
    here = here | {name: here[name].one_piece(stream) for name in kind.rows if name in here}
    seen = {name: operand.seen for name, operand in here.items()}
    call: Any = check(values | seen, sequences)
    changed = tuple(given[each.name] for each in op.inputs if each.inout and not each.keyword)
    made, returned = [], changed if len(changed) > 1 else changed[0] if changed else ()
    if op.outputs:
        usual = sum(not each.only_with for each in op.outputs)
        made, returned = results.outputs(call.results, usual, out, source, stream)

    idle = {name for name in here if name in (*kind.idle(call), *host_only) or here[name].seen is None}
    there = here | arrays.moved({name: here[name] for name in here if name not in idle}, stream)
    copies = [result.moved(stream, contents=False) for result in made]
    moved = [name for name in here if there[name] is not here[name]]
    if moved:
        call = check(values | {name: operand.seen for name, operand in there.items()}, sequences)
    scale = here["scale"].moved(stream) if "scale" in host_only else None
    ready = launches.DeviceCall(call, [copy.seen for copy in copies], step, stream, scale)
    made_launches = kind.launches(ready)
    with prepared.RUNNING:
        for launch in made_launches:  # nothing was written before, and launches cannot fail
            launch()
    operands = there | {prepared.result(i): copy for i, copy in enumerate(copies)}
    pairs = *((there[name], whole[name]) for name in there), *zip(copies, made, strict=True)
    stays = all(operand is given for operand, given in pairs)
    operands = {name: each for name, each in operands.items() if isinstance(each.seen, np.ndarray)}
    if repeated and stays and not repeated.arrays.keys() & {*host_only}:
        forms = list(call.results.forms.values()) if made else []
        places = step.room(call), step.of(call).tables, ready.owners
        again = prepared.PreparedCall(repeated.written, made_launches, operands, forms, *places)
        step.calls.keep(repeated.form, again)
    for each in op.inputs:
        if each.name in moved and each.changes(here[each.name].seen):
            here[each.name].take(there[each.name], stream)
    for result, copy in zip(made, copies, strict=True):
        result.take(copy, stream)
    return returned
