"""Call llama.cpp, the shared library of a release, through ctypes, with a tiny random model.

Parameters are passed in structs that only the library fills in: their sizes are larger than its own.
"""

import ctypes
from pathlib import Path

import gguf
import numpy as np

LAYERS, HEADS, KEY_HEADS, DIM, WORDS = 2, 4, 2, 64, 48
TYPES = {"f16": 1, "q8_0": 8}  # ggml's numbers of cache types


class Parameters(ctypes.Structure):
    """Describes a struct of C that is passed by value."""

    _fields_ = [("bytes", ctypes.c_uint8 * 1024)]


POINTER, INT, PATH, SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t
FUNCTIONS = {  # result, arguments
    "model_default_params": (Parameters,),
    "model_load_from_file": (POINTER, PATH, Parameters),
    "context_default_params": (Parameters,),
    "init_from_model": (POINTER, POINTER, Parameters),
    "batch_get_one": (Parameters, POINTER, INT),
    "decode": (INT, POINTER, Parameters),
    "get_logits": (ctypes.POINTER(ctypes.c_float), POINTER),
    "get_memory": (POINTER, POINTER),
    "memory_seq_rm": (ctypes.c_bool, POINTER, INT, INT, INT),
    "state_seq_save_file": (SIZE, POINTER, PATH, INT, POINTER, SIZE),
    "state_seq_load_file": (SIZE, POINTER, PATH, INT, POINTER, SIZE, ctypes.POINTER(SIZE)),
}


def write_model(path, rng):
    """Write a model of llama's kind without a vocabulary."""
    width, between, row = HEADS * DIM, 32, KEY_HEADS * DIM
    writer = gguf.GGUFWriter(path, "llama")
    for name, number in (
        ("block_count", LAYERS), ("context_length", 512), ("embedding_length", width), ("vocab_size", WORDS),
        ("feed_forward_length", between), ("head_count", HEADS), ("head_count_kv", KEY_HEADS),
        ("layer_norm_rms_eps", 1e-5), ("rope_dimension_count", DIM), ("tokenizer_model", "no_vocab"),
    ):  # fmt: skip
        getattr(writer, f"add_{name}")(number)
    shapes = {"token_embd": (WORDS, width), "output_norm": (width,), "output": (WORDS, width)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.{name}": (width, width) for name in ("attn_q", "attn_output")}
        shapes |= {f"blk.{i}.{name}": (row, width) for name in ("attn_k", "attn_v")}
        shapes |= {f"blk.{i}.{name}": (between, width) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{i}.ffn_down"] = (width, between)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (rng.standard_normal(shape) * 0.1).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Engine:
    """Holds the library and a model; its attributes are functions, by their names without ``llama_``."""

    def __init__(self, folder, model):
        [ggml], [llama] = (sorted(Path(folder).glob(f"{name}.v*.so")) for name in ("libggml", "libllama"))
        ctypes.CDLL(str(Path(folder) / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        backends = ctypes.CDLL(str(ggml), ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(llama))
        for name, (result, *arguments) in FUNCTIONS.items():
            function = getattr(self.library, f"llama_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.silence = ctypes.CFUNCTYPE(None, INT, PATH, POINTER)(lambda level, text, data: None)
        self.library.llama_log_set(self.silence, None)
        backends.ggml_backend_load_all_from_path(str(folder).encode())
        self.model = self.model_load_from_file(str(model).encode(), self.model_default_params())
        assert self.model

    def context(self, kind="f16"):
        """Return a new context, whose keys and values are of a type."""
        params = self.context_default_params()
        numbers = np.frombuffer(params.bytes, np.int32, 40)
        [at] = [i for i in range(39) if numbers[i : i + 2].tolist() == [TYPES["f16"]] * 2 and i >= 24]
        numbers[at : at + 2] = TYPES[kind]
        found = self.init_from_model(self.model, params)
        assert found
        return found

    def run(self, context, tokens):
        """Decode tokens; return the logits of the last one."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        assert self.decode(context, self.batch_get_one(tokens.ctypes.data, len(tokens))) == 0
        return np.ctypeslib.as_array(self.get_logits(context), (WORDS,)).copy()

    def save(self, context, path, tokens):
        """Write the state of sequence 0."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        assert self.state_seq_save_file(context, str(path).encode(), 0, tokens.ctypes.data, len(tokens))

    def load(self, context, path):
        """Read a state into sequence 0; return its tokens."""
        tokens, count = np.zeros(512, np.int32), SIZE()
        given = context, str(path).encode(), 0, tokens.ctypes.data, len(tokens), ctypes.byref(count)
        assert self.state_seq_load_file(*given)
        return tokens[: count.value].tolist()
