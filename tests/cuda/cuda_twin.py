"""A pytest plugin: kvkit_cuda runs the scenes; in the CUDA simulator its blocks are small."""

import attention_scenes
import scenes

import kvkit
import kvkit_cuda
from kvkit_cuda.attend import forms, merge
from kvkit_cuda.ground import device
from kvkit_cuda.moves import transfer

if device.SIMULATED:
    transfer.THREADS, forms.THREADS, merge.THREADS = 16, 8, 4
ORACLES = {kind: oracle for kind, (_, oracle) in scenes.OPERATORS.items()}
scenes.OPERATORS = {
    "static": (kvkit_cuda.key_value_cache, ORACLES["static"]),
    "dynamic": (kvkit_cuda.dynamic_batching.key_value_cache, ORACLES["dynamic"]),
}
attention_scenes.kvkit = kvkit_cuda
MERGE = kvkit.merge_attention_states
kvkit.merge_attention_states = kvkit_cuda.merge_attention_states
