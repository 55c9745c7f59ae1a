"""Every verb from tables: what a good call prints, its --json form, and a line and a code for a bad one."""

import json

import click
import pytest
import verbs
from pack_scenes import pmx_pack
from verbs import kvkit

import kvkit as package
from kvkit.files import members
from kvkit.layouts import NAMED
from kvkit.operators import OPERATORS, REQUIRED
from kvkit_cli.main import VERBS, main

PACK = "PACK"  # stands for the folder of a pack, which each process of tests makes
KV = "run key_value_cache"
RUN = f"{KV} in.npz -o out.npz"
ATTEND = "run multi_head_attention whole-attention.npz -o out.npz --set"
MODE = "run ascend.reshape_and_cache modes.npz -o out.npz --set compress_type"
CONVERT = "convert hf.safetensors new.npz --to"


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Return a folder with every file that the tables name."""
    return verbs.fill(tmp_path_factory.mktemp("verbs"))


@pytest.fixture
def folder(room, monkeypatch):
    """Make the folder current; check that no command changes a file in it."""
    before = {path.name: path.read_bytes() for path in room.iterdir()}
    monkeypatch.chdir(room)
    yield room
    assert {path.name: path.read_bytes() for path in room.iterdir()} == before


FINE = [  # the code; the command; texts in what it prints
    (0, "list layouts", "\nhf ", "l kv | b h n c"),
    (0, "draw LBNHC --sizes n=2,c=64", "also called LBNHC", "vLLM, since 0.26", "kv         2      64\n",
     "n          2     256\n", "b0 | K n0 h0 | V n0 h0 | K n0 h1 | V n0 h1 |\n"),
    (0, "draw '| b c n'", "| b c n\none array"),
    (0, "inspect hf.safetensors --layer 1 --row 17", "layer 1 values, row 17\n  head 0: "),
    (0, "describe KeyValueCache", "key_value_cache: ", "PMX KeyValueCache"),
    (0, "describe ReshapeAndCache", "ascend.reshape_and_cache: "),
    (0, "inspect hf.safetensors --stats", ": 4 arrays", "layout: hf", "rope_base: 100000.0",
     "layer 1 values"),
    (0, "inspect pool-of-nan.npz", "vllm-lbnhc"),
    (0, "draw hf.safetensors", "hf: l kv | b h n c\nlists of 2 (l) of 2 (kv) arrays",
     "note: the file has no page tables"),
    (0, "draw LBNHC", "vllm-lbnhc: "),
    (0, "draw fine.npz", "0  ....\n1  aaaa\n2  aaaa\n3  bbbb\na 8 rows, b 4 rows; . free 4\n"),
    (0, "draw shared.npz", "0  aa..\n1  ....\n2  ####\n3  ..~.\n",
     "a 6 rows, b 4 rows; . free 9, ~ stale 1, # shared 4\n"),
    (0, "draw roomy.npz", "3  bbbb\n4  ....\n5  ....\na 8 rows, b 4 rows; . free 12\n"),
    (0, "check fine.npz", "nothing found: 8 rules checked\n", "slot_mapping (P4, S1"),
    (1, "check wrong.npz", "error P3 block_tables[1, 0]: page"),
    (0, "check before.npz --after after.npz", "fine"),
    (1, "check before.npz --after beside.npz", "error W1 key_cache[1, 2]"),
    (0, "check pool.npz", "Name it: --layout NAME"),
    (0, "diff a.npz a.npz", "equal: 128 bytes\n"),
    (0, "diff a.npz b.npz --atol 100", "equal"),
    (1, "diff a.npz b.npz", "first: position 0, head 0, element 0: expected 1.0, got 49.0",
     "row off by one (row +1) explains"),
    (0, f"vectors verify {PACK}", ""),
    (0, f"vectors replay {PACK} --operator merge_attention_states", "3 passed\n"),
    (0, "study hf.safetensors --schemes fp8,int8:g8", "int8:g8", "the 3 worst heads"),
    *((0, f"{KV} in.npz --check {target}", "the call is legal; nothing was computed or written\n")
      for target in ("", "-o out.npz", "--in-place")),
]  # fmt: skip


@pytest.mark.parametrize(("code", "command", "texts"), [(code, line, texts) for code, line, *texts in FINE])
def test_fine(folder, code, command, texts):
    found = kvkit(command.replace(PACK, str(pmx_pack())))
    assert (found[0], found[2]) == (code, "")
    assert all(text in found[1] for text in texts), found[1]
    assert "\x1b" not in found[1]
    assert [line for line in found[1].splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize(
    ("code", "command"),
    [(0, "inspect hf.safetensors"), (1, "check wrong.npz"), (1, "diff a.npz b.npz"),
     (0, f"vectors verify {PACK}"), (0, "list layouts"), (0, "draw LBNHC"),
     (0, "study hf.safetensors --schemes fp8")],
)  # fmt: skip
def test_quiet(folder, code, command):
    assert kvkit(f"{command.replace(PACK, str(pmx_pack()))} -q") == (code, "", "")


FOUND = {"minimum": 0, "maximum": 1, "nan": 16 * 2 * 64, "infinite": 1, "zero_rows": 2, "rows": 128}
USED = {
    "convention": "block tables", "lengths": [20, 9], "page_size": 16, "blocks": 2, "shared": 1,
    "positions": None,
}  # fmt: skip
DEFAULTS = [list(each.default) if each.kind is tuple else each.default
            for each in OPERATORS["multi_head_attention"].attributes]  # fmt: skip
JSON = [  # the code; the command without --json; what is looked at; its value
    (0, "list ops", lambda x: [op["name"] for op in x], list(OPERATORS)),
    (0, "describe multi_head_attention", lambda x: [each["name"] for each in x["inputs"]],
     [array.name for array in OPERATORS["multi_head_attention"].inputs]),
    (0, "describe multi_head_attention",
     lambda x: [each.get("default", REQUIRED) for each in x["attributes"]], DEFAULTS),
    (0, "info", lambda x: x["kvkit"], package.__version__),
    (0, "list layouts", lambda x: [each["name"] for each in x], list(NAMED)),
    (0, "draw LBNHC", lambda x: x["aliases"][0], "LBNHC"),
    (0, "inspect hf.safetensors", lambda x: x["sizes"], {"l": 2, "b": 1, "n": 21, "h": 3, "c": 8}),
    (0, "inspect hf.safetensors --stats", lambda x: (x["numbers"][0]["name"], x["numbers"][0]["nan"]),
     ("layer 0 keys", 0)),
    (0, "inspect pool-of-nan.npz --layout vllm-lbnhc --stats",
     lambda x: (x["numbers"][0], x["use"]), ({"name": "layer 0 keys"} | FOUND, USED)),
    (1, "check wrong.npz", lambda x: x["counts"], {"P3": 1}),
    (0, "check pool.npz", lambda x: "Name it: --layout NAME" in x["findings"][0]["hint"], True),
    (1, "diff a.npz b.npz", lambda x: x["causes"][0]["name"], "row off by one"),
    (0, "study hf.safetensors --schemes fp8", lambda x: x["summary"][0]["bits"], 8),
]  # fmt: skip


@pytest.mark.parametrize(("code", "command", "look", "value"), JSON)
def test_json(folder, code, command, look, value):
    found = kvkit(f"{command} --json")
    assert (found[0], found[2]) == (code, "")
    assert look(json.loads(found[1])) == value


NO_GPU = "expected an NVIDIA GPU and its driver"
REFUSED = [  # the command; texts of its message; the code, if it is not 2
    ("rnu", "no verb 'rnu' (did you mean run?) (see kvkit --help)"),
    ("RUN", "no verb 'RUN' (did you mean run?)"),
    ("vectors", "kvkit: expected one of the commands diff, export, make, replay, verify (see"),
    ("frobnicate", f"no verb 'frobnicate'; there are {', '.join(VERBS)} (see kvkit"),
    ("alibi_mask IN", "but an operator: kvkit run alibi_mask IN.npz -o OUT.npz (see kvkit --help)"),
    ("--nothing", "--nothing"),
    ("run", "missing OP: an operator that kvkit list ops prints (see kvkit run --help)"),
    ("diff a.npz", "missing B: the file that is compared with A (see kvkit diff --help)"),
    (f"{KV} in.npz -o o.txt", "-o o.txt: results are written as .npz, not as .txt: give -o o.npz"),
    ("run key_value_cach in.npz -o out.npz", "(did you mean key_value_cache"),
    ("fine.npz", "no verb 'fine.npz', but a file: kvkit inspect fine.npz (see"),
    ("cache clean", "no verb 'cache': it is kvkit clean"),
    ("describe FlashAttention", "OP: expected merge_attention_states (the online softmax of"),
    (
        "describe reshape_and_cache",
        "OP: expected paged_append (vLLM reshape_and_cache, FlashInfer append_paged_kv_cache) or "
        "ascend.reshape_and_cache (Ascend ATB ReshapeAndCache), got reshape_and_cache, a name of both",
    ),
    ("describe nothing", "no operator 'nothing': see kvkit list ops"),
    (f"{KV} in.npz -o x.npy", "-o x.npy: results are written as .npz, not as .npy"),
    (f"{KV} in.npz -o x.safetensors", "not as .safetensors: give -o x.npz"),
    (f"{KV} in.npz -o -", "-o -: .npz files are not read from or written to pipes"),
    (f"{KV} - -o out.npz", "IN.npz -: .npz files are not read from or written"),
    (f"{KV} in.npz", "nothing to write: give -o OUT.npz, --in-place or both"),
    (f"{KV} in.npz -o in.npz", "-o names the input"),
    (f"{KV} in.npz -o no/out.npz", "there is no folder"),
    (f"{KV} absent.npz -o out.npz", "absent.npz: no such file"),
    (f"{KV} absent.npz --in-place", "absent.npz: no such file"),
    (f"{KV} short.npz -o out.npz", "short.npz: not a zip archive"),
    *((f"{KV} {name} {to}", f"{name}: not a .npz file, but ", "numpy.savez")
      for name in ("x.npy", "plain.safetensors", "x.pt") for to in ("-o out.npz", "--in-place")),
    (f"{RUN} --backend tpu", "'tpu'"),
    (f"{RUN} --backend cuda", NO_GPU, 1),
    (f"{KV} in.npz --in-place --backend cuda", NO_GPU, 1),
    (f"{RUN} --threads many", "many"),
    (f"{RUN} --threads 0", "kvkit: --threads 0: expected 1 to "),
    (f"{RUN} --threads 999999", "kvkit: --threads 999999: expected 1 to "),
    (f"{RUN} --check --set start_pos=9", "start_pos: expected room for "),
    (f"{KV} in.npz --in-place --set layer_idx=7", "layer_idx"),
    (f"{RUN} --set num_layers=1", "no such name (did you mean num_layer?); there are start_pos, num_layer"),
    (f"{RUN} --set cache=1", "no such name (did you mean cache_layout?); there are start_pos"),
    *((f"{RUN} --set num_layer{text}", "expected num_layer=NUMBER") for text in ("", "=", "=a")),
    *((f"{RUN} --set {text}", f"{text}: expected an integer")
      for text in ("num_layer=1.0", "num_layer=True", "num_layer=[1]", "num_layer=None")),
    (f"{RUN} --set num_layer=0", "num_layer"),
    (f"{RUN} --set start_pos=1.5", "start_pos=1.5: expected an integer of int64"),
    (f"{RUN} --set start_pos={2**63}", "expected an integer of int64"),
    (f"{RUN} --set start_pos=-1", "start_pos"),
    (f"{RUN} --set start_pos=1000", "start_pos"),
    (f"{RUN} --set num_layer=3 --set num_layer=1", "num_layer is set twice"),
    (f"{RUN} --map k", "--map k: expected ARRAY=NAME"),
    (f"{RUN} --map k=current_kay", "key_value_cache takes no current_kay (did you mean current_key?)"),
    (f"{RUN} --map kay=current_key", "=current_key: in.npz has no array kay; there are current_key, "),
    (f"{KV} renamed.npz -o out.npz --map k=current_key --map k=scale", "--map k=scale: k is mapped twice"),
    (f"{KV} no-cache.npz -o out.npz", "missing current_key, cache: add arrays of these names; key_"),
    (f"{KV} no-start.npz -o out.npz", "missing start_pos: ", "names or give --set start_pos=NUMBER; "),
    (f"{KV} more.npz -o out.npz", "kvkit: more.npz: unknown arrays cach (did you mean cache?), other; "),
    (f"{KV} some-more.npz -o out.npz", "kvkit: some-more.npz: unknown arrays a, b, c, d, e; key_value_cache"),
    ("run dynamic_batching.position_index steps.npz -o out.npz --set max_seqlen=1.5",
     "--set max_seqlen=1.5: expected an integer of int64"),
    (f"{KV} output.npz -o out.npz", "unknown arrays key", "value, start_pos, cache, scale, num_layer"),
    (f"{KV} one-layer.npz -o out.npz", "num_layer has shape (1,), but is an attribute, a 0-d array"),
    (f"{KV} half-a-layer.npz -o out.npz", "kvkit: half-a-layer.npz: num_layer=1.5: expected an integer"),
    (f"{KV} text-layer.npz -o out.npz", "num_layer='x': expected an integer"),
    (f"{KV} small-cache.npz -o out.npz", "cache"),
    (f"{ATTEND} window=left", "--set window=left: expected window=NUMBER,NUMBER"),
    (f"{ATTEND} window=3", "window=3: expected two integers"),
    (f"{ATTEND} window=1,2,3", "window: expected a pair of integers (left, right), got tuple (1, 2, 3)"),
    (f"{ATTEND} softmax_scale=half", "expected softmax_scale=NUMBER"),
    (f"{ATTEND} \"softmax_scale='half'\"", "softmax_scale='half': expected a number or None"),
    (f"{ATTEND} return_lse=yes", "expected return_lse=True or False"),
    (f"{ATTEND} return_lse=2", "return_lse=2: expected True or False"),
    (f"{ATTEND} num_heads=eight", "expected num_heads=NUMBER"),
    (f"{ATTEND} sinks=1", "no such name; there are num_heads"),
    ("run multi_head_attention window.npz -o out.npz",
     "window.npz: window has shape (3,), but is two integers, an array of shape (2,)"),
    (f"{MODE}=ROPE", "compress_type=ROPE: expected compress_type=UNDEFINED|KVHEAD|KVHEAD_ROPE|OMNI|NUMBER"),
    (f"{MODE}=4", "compress_type: expected 0 or 1 or 2 or 3, got 4"),
    (f"{MODE}=None", "expected UNDEFINED or KVHEAD or KVHEAD_ROPE or OMNI or an"),
    ("run ascend.reshape_and_cache mode.npz -o out.npz", "npz: compress_type='ROPE': expected UNDEFINED or"),
    ("run alibi_slope -o no.npz", "no IN.npz: missing num_heads: ", " or give --set num_heads=NUMBER; "),
    ("run alibi_slope --in-place", "--in-place: alibi_slope changes none of its inputs: give -o"),
    ("run alibi_slope", "nothing to write: give -o OUT.npz\n"),
    ("warm --formats flot16", "--formats flot16: expected a format that `kvkit list formats` prints"),
    ("warm --formats int8:g7", "--formats int8:g7: expected a group that divides a head of 128 elements"),
    ("warm --formats int8:x", "--formats int8:x: expected options among gN"),
    ("warm --formats q8_0", "--formats q8_0: expected floats or int8, int4 with their group"),
    ("warm --backend cuda", f"{NO_GPU}, got no driver (libcuda): install NVIDIA's driver", 1),
    ("warm --backend cuda --formats int9", "--formats int9: expected a format that"),
    ("warm --backend cuda cache", "cache: --backend cuda compiles attention and cache together: leave"),
    ("warm --backend cuda --queries 0", "'--queries': 0 is not in the range x>=1"),
    ("draw hf --sizes n", "--sizes n: expected AXIS=NUMBER"),
    ("draw hf --sizes q=1", "--sizes: expected positive integers"),
    ("draw fine.npz --json", "--json: expected a layout beside it, got the file fine.npz"),
    ("inspect hf.safetensors --row 3", "--layer: expected a layer and a row, beside each other"),
    ("inspect hf.safetensors --layer 2 --row 3", "--layer: expected one of [0, 1], got 2"),
    ("inspect hf.safetensors --layer 1 --row 21", "--row: expected 0 to 20, got 21"),
    ("inspect hf.safetensors --layer 1 --row -1", "--row: expected 0 to 20, got -1"),
    ("inspect hf.safetensors --layout vllm-lbnhc", "arrays"),
    ("inspect pool.npz --layout nope", "--layout: expected a line, such as"),
    *((f"{verb} no-tables-{i}.npz", "expected") for verb in ("inspect", "draw") for i in range(6)),
    (f"{CONVERT} no-such", "--to: expected a line, such as ", "or a name that `kvkit list layouts` prints"),
    (f"{CONVERT} vllm-lbnh", "got 'vllm-lbnh' (did you mean vllm-lbnhc"),
    (f"{CONVERT} vllm-lbnhc --from mlx-not", "--from: expected"),
    (f"{CONVERT} flash-attn", "--to: expected an axis l, as the source has 2 of them: 'l kv | b n h c', got"),
    ("convert hf.safetensors o.npz", "--to: expected a layout, or a format instead, got neither"),
    ("convert hf.safetensors o.npz --format q8", "got 'q8' (did you mean q8_0"),
    ("convert hf.safetensors o.npz --format q8_0 --page-size 4", "--page-size: expected none with a format"),
    ("study hf.safetensors --schemes int4g", "--schemes: expected a format that `kvkit list formats` prints"),
    ("study hf.safetensors --schemes int4g", "got 'int4g' (did you mean int4"),
    ("study hf.safetensors --threshold 0", "--threshold: expected a positive number"),
    (f"{CONVERT} vllm-lbnhc --from ort-paged", "expected hf, as the file says, got ort-paged"),
    (f"{CONVERT} vllm-lbnhc --sizes h=4", "expected"),
    (f"{CONVERT} vllm-lbnhc --page-size 0", "--page-size: expected a number of tokens, such as 4096 or 128k"),
    (f"{CONVERT} vllm-lbnhc --page-size 2048m", "--page-size 2048m: expected less than 2147483648 tokens"),
    ("study hf.safetensors --tokens 4q", "--tokens: expected a number of tokens, such as 4096 or 128k"),
    ("size llama-3.1-8b --fit 24", "--fit: expected a number of bytes with", "(did you mean 24GiB?)"),
    ("convert hf.safetensors hf.safetensors --to vllm-lbnhc", "OUT is IN: give another name"),
    ("convert hf.safetensors x.pt --to vllm-lbnhc", "give such a name"),
    ("convert hf.safetensors x.npy --to vllm-lbnhc", "a .npy file has one array"),
    ("convert odd.npz old.npz --to hf", "does not name one"),
    ("convert pool.npz new.npz --to hf", "pool.npz: --from: expected a layout, as"),
    ("convert pool.npz new.npz", "pool.npz: --to: expected a layout, or a format instead"),
    ("convert pool.npz new.npz --format q8_0 --page-size 4", "--page-size: expected no"),
    ("draw vllm-lbnh", "no such file, and no layout (did you mean vllm-lbnhc"),
    ("draw hf -o hf.png", "give -o"),
    ("draw x.npy", "--layout: expected a layout, as x.npy has no tables and names none, got None"),
    *((f"check {rest}", "") for rest in ("broken.npz", "x.npz", "fine.npz --after x.npz")),
    ("diff a.npz broken.npz", ""),
    ("diff a.npz b.npz --layout-a colour", "--layout-a: expected a line"),
    ("diff a.npz b.npz --ulp -1", "--ulp: expected at least 0"),
    ("check fine.npz --before a.npz", "--before a.npz: expected --after beside it, got none"),
    ("check fine.npz wrong.npz --after a.npz", "--after a.npz: expected one FILE before it, got 2"),
    ("diff a.npz fine.npz", "B: expected some array of key"),
    ("diff pool.npz a.npz --layout-b 'n h c'", "--layout-a: expected a layout"),
    *((f"vectors {rest}", "")
      for rest in ("verify .", "make .", "export . x")),
    ("study pool.npz", "--layout: expected a layout, as the file does not name one"),
    ("study fine.npz", "FILE: expected an array 'cache' and its layout"),
    ("study hf.safetensors --schemes none -o x.npy/in", "output: expected a folder that exists or can be"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "texts"), [(line, texts) for line, *texts in REFUSED])
def test_refused(folder, command, texts):
    code = texts.pop() if texts[-1] == 1 else 2
    found = kvkit(command)
    assert found[:2] == (code, "")
    assert found[2].startswith("kvkit: ")
    assert found[2].endswith("\n")
    assert found[2][:-1].isprintable()
    assert all(text in found[2] for text in texts), found[2]


MISSING = {  # {verb: what it needs beside a file or folder that is missing, X}
    "run": [f"{KV} X -o out.npz", f"{KV} X --in-place"],
    "check": ["check X", "check fine.npz --after X", "check --before X --after fine.npz",
              "check fine.npz --model X"],
    "diff": ["diff X a.npz", "diff a.npz X", "diff a.npz b.npz --like X"],
    "study": ["study X", "study hf.safetensors --rope X", "study --model X --text X"],
    "size": ["size X"],
    "inspect": ["inspect X", "inspect hf.safetensors --model X"],
    "draw": ["draw X", "draw hf --layout hf"],
    "convert": ["convert X new.npz --to hf", f"{CONVERT} vllm-lbnhc --tables X --page-size 4"],
    "edit": ["edit X --remove 1:2 -o new.npz"],
    "vectors": [f"vectors {verb}" for verb in ("verify X", "replay X", "diff X .", "export X new")],
}  # fmt: skip


def test_a_missing_file_is_the_same_sentence_everywhere(folder):
    """A folder is called a folder, and draw takes a name without a suffix for that of a layout, too."""
    commands = {verb: main.get_command(click.Context(main), verb) for verb in VERBS}
    groups = {verb: [*getattr(each, "commands", {}).values(), each] for verb, each in commands.items()}
    with_files = {verb for verb, members in groups.items() for each in members for param in each.params
                  if isinstance(param, click.Argument) and isinstance(param.type, click.Path)}  # fmt: skip
    assert with_files <= MISSING.keys()
    for verb, lines in MISSING.items():
        for line in lines:
            kind, name = ("folder", "absent") if verb == "vectors" else ("file", "absent.json")
            name = "hf" if "X" not in line else name
            found = kvkit(line.replace("X", name))
            assert found == (2, "", f"kvkit: {name}: no such {kind}: check the name\n"), line


def test_notes_name_options(folder):
    """The same notes name arguments in Python."""
    for command, text in (("inspect a.npz", "; --layout NAME names another"),):
        assert text in kvkit(command)[1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("odd-cache", "cache: expected shape 0: (MaxB, L, 2, MaxS"),
        ("wide-cache", "int8 or uint8, got float64: array.astype(np.float32)"),
        ("list-start", "start_pos: expected dtype int64 or int32, got float64"),
        ("many-layers", "num_layer has shape (1000, 1000), but is an a"),
        ("more", "unknown arrays cach"),
    ],
)
def test_what_a_header_says_is_refused_unread(folder, monkeypatch, name, text):
    monkeypatch.setattr(members, "as_bytes", None)  # of an array whose elements are read
    found = kvkit(f"{KV} {name}.npz -o out.npz")
    assert (found[0], text in found[2]) == (2, True)
