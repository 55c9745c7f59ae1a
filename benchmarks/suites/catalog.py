"""List all suites of `kvkit bench`."""

from benchmarks.suites import (
    ascend,
    attention,
    cache_operators,
    caches,
    first_calls,
    growth,
    latent,
    models,
    pools,
    shapes,
    small_calls,
    states,
    tiles,
)

SUITES = {  # by the file of their figures
    "cpu": [*cache_operators.CASES, *ascend.CASES],
    "attention": [*attention.CASES, *pools.CASES],
    "decoding": attention.DECODE,
    "rivals": attention.RIVALS,
    "caches": caches.CASES,
    "latent": latent.CASES,
    "states": states.CASES,
    "growth": growth.CASES,
    "shapes": shapes.CASES,
    "tiles": tiles.CASES,
    "small": small_calls.CASES,
    "first": first_calls.CASES,
    "models": models.CASES,
}
