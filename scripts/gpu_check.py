#!/usr/bin/env python3
"""What scripts/gpu_check.sh leaves to Python. WORK is its folder of notes: each part of a run writes a file there as soon as it knows something, so that a report can be made at any time.

    slim WHEEL                      drop from llama-cpp-python's wheel what only a build needs
    manifest FILE KEY=VALUE ...     JSON
    device WORK [--device NAME]     choose the device, print its name, describe the machine in WORK/machine.json
    report WORK OUT                 WORK/pass-*.json and the rest as OUT/gpu_check.md and .json; exit code 1 when parity failed, 3 when nothing was measured
"""

import argparse
import ctypes
import json
import os
import re
import struct
import subprocess
import sys
import zipfile
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NVIDIA = 0x10DE


# --- pack

def is_needed(name: str) -> bool:
    """A wheel holds no links: the libraries lie in it six times, in two folders and under three names. llama_cpp opens libggml.so, libllama.so and libmtmd.so in its own folder;
    those ask for lib*.so.0."""
    return not (name.startswith(("lib/", "bin/", "include/")) or re.search(r"\.so\.\d+\.\d|/libggml-\w+\.so$", name))


def slim(options) -> int:
    """In place."""
    wheel = options.wheel
    partial = wheel.with_name(wheel.name + ".partial")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                data = b"".join(line for line in data.splitlines(keepends=True) if is_needed(line.decode().split(",")[0]))
            if is_needed(entry.filename):
                new.writestr(entry, data, compress_type=zipfile.ZIP_DEFLATED)
    os.replace(partial, wheel)
    return 0


def manifest(options) -> int:
    options.file.write_text(json.dumps(dict(pair.split("=", 1) for pair in options.pairs), indent=1) + "\n")
    return 0


# --- run: the machine

class InstanceInfo(ctypes.Structure):
    """VkInstanceCreateInfo"""

    _fields_ = [
        ("type", ctypes.c_int32), ("next", ctypes.c_void_p), ("flags", ctypes.c_uint32), ("application", ctypes.c_void_p),
        ("n_layers", ctypes.c_uint32), ("layers", ctypes.c_void_p), ("n_extensions", ctypes.c_uint32), ("extensions", ctypes.c_void_p),
    ]


def vulkan_devices() -> list[dict]:
    """Name, driver and API version of each, from Vulkan itself: ggml tells only names, and nvidia-smi only NVIDIA's. Empty where Vulkan does not work."""
    try:
        vulkan = ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return []
    instance, n = ctypes.c_void_p(), ctypes.c_uint32()
    if vulkan.vkCreateInstance(ctypes.byref(InstanceInfo(type=1)), None, ctypes.byref(instance)) != 0:
        return []
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(n), None)
    handles = (ctypes.c_void_p * n.value)()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(n), handles)
    found = []
    for handle in handles[: n.value]:
        properties = ctypes.create_string_buffer(4096)  # VkPhysicalDeviceProperties has 824 bytes
        vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(handle), properties)
        api, driver, vendor = struct.unpack_from("<3I", properties.raw)
        name = properties.raw[20:276].split(b"\0")[0].decode(errors="replace")
        numbers = (driver >> 22, driver >> 14 & 0xFF, driver >> 6 & 0xFF) if vendor == NVIDIA else (driver >> 22, driver >> 12 & 0x3FF, driver & 0xFFF)
        found.append({"name": name, "driver": "{}.{}.{:02}".format(*numbers) if vendor == NVIDIA else "{}.{}.{}".format(*numbers), "vulkan": f"{api >> 22}.{api >> 12 & 0x3FF}.{api & 0xFFF}"})
    vulkan.vkDestroyInstance(instance, None)
    return found


def git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def named(device) -> str:
    return f"{device.name} ({device.description})"


def no_gpu(found: list) -> str:
    software = [d for d in found if d.is_software]
    if software:
        return f"no GPU: found {', '.join(named(d) for d in software)}, a software device: name it with --device"
    others = ", ".join(d.name for d in found) or "nothing"
    seen = ", ".join(f"{d['name']} (driver {d['driver']})" for d in vulkan_devices())
    hint = "Vulkan sees no device: is a driver installed, with its description (*_icd.json) where VK_DRIVER_FILES or the loader finds it?"
    if seen:
        hint = f"Vulkan has {seen}, which llama.cpp leaves out: it lacks something, or is a software device and GGML_VK_VISIBLE_DEVICES=0 does not name it"
    return f"no GPU: llama.cpp found {others}; {hint}"


def device(options) -> int:
    from llama_cpp import llama_cpp as C

    log: list[str] = []
    keep = C.llama_log_callback(lambda level, text, data: log.append(text.decode(errors="replace")))
    C.llama_log_set(keep, ctypes.c_void_p(0))
    from edgemoe import machine
    from edgemoe.cache_plan import choose_device
    from edgemoe.devices import devices
    from edgemoe.errors import EdgemoeError

    found = devices()
    gpus = [d for d in found if d.type in ("gpu", "igpu") and not d.is_software]
    try:
        chosen = choose_device(found, options.device) if options.device else next((d for d in gpus if d.type == "gpu"), gpus[0] if gpus else None)
    except EdgemoeError as e:
        print(e, file=sys.stderr)
        return 1
    if chosen is None:
        print(no_gpu(found), file=sys.stderr)
        return 1
    driver = next((d for d in vulkan_devices() if d["name"] == chosen.description), {}) if chosen.name.startswith("Vulkan") else {}
    about = {
        "device": chosen.name, "description": chosen.description, "type": chosen.type, "bytes": chosen.total, "driver": driver.get("driver", "unknown"), "vulkan": driver.get("vulkan", ""),
        # "0 = NVIDIA H200 (NVIDIA) | uma: 0 | fp16: 1 | warp size: 32 | int dot: 1 | matrix cores: ..."
        "llama_cpp_says": [line.removeprefix("ggml_vulkan: ") for line in "".join(log).splitlines() if re.match(r"ggml_vulkan: \d+ = ", line)],
        "others": [named(d) for d in found if d is not chosen and d.type != "accel"],
        "cpu": machine.cpu_name(), "threads": machine.default_threads(), "n_cores": machine.physical_cores(), "memory_bytes": machine.memory().total,
        "head": git("rev-parse", "HEAD"),
    }
    (options.work / "machine.json").write_text(json.dumps(about, indent=1))
    print(chosen.name)
    return 0


# --- run: the report

def read_json(path: Path, default):
    """`default` also for a file that is being written."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return default


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def judge(passes: dict[str, dict], bound: float) -> tuple[list[str], dict[str, float]]:
    """(what is too far from plain llama.cpp, rms by variant, the largest of all passes). llama.cpp's own variants are shown, not judged."""
    largest: dict[str, float] = {}
    for one in passes.values():
        for row in one["rows"]:
            before = largest.get(row["variant"], 0.0)
            largest[row["variant"]] = row["rms"] if not row["rms"] <= before else before  # NaN stays
    return [name for name, rms in largest.items() if not rms <= bound and not name.startswith("llama.cpp")], largest


def verdict(failed: list[str], largest: dict[str, float], bound: float) -> str:
    own = largest.get("llama.cpp, all on GPU")
    beside = f"; llama.cpp itself, all on this GPU: {own:.2g}" if own is not None else ""
    if failed:
        return "**FAILED**: " + ", ".join(f"{name} (rms {largest[name]:.2g})" for name in failed) + f", wanted at most {bound}{beside}"
    judged = [rms for name, rms in largest.items() if not name.startswith("llama.cpp")]
    return f"passed by {len(judged)} variants: logits within {max(judged):.2g} of plain llama.cpp's on the CPU (rms in standard deviations, wanted at most {bound}){beside}"


def commit_of(pack: dict, about: dict) -> str:
    packed, head = pack.get("commit", ""), about.get("head", "")
    changed = ", with changes that were not committed" if pack.get("changed") == "yes" else ""
    if head and packed and head != packed:
        changed += f" (the checkout it ran in is at {head[:12]})"
    return (packed[:12] or head[:12] or "unknown") + changed


def facts(work: Path, pack: dict, about: dict, parity: str) -> list[tuple[str, str]]:
    memory = f", {about['bytes'] / 2**30:.1f} GiB" if about.get("bytes") else ""
    rows = [
        ("parity", parity),
        ("GPU", f"{about['device']}: {about['description']}{memory}; driver {about['driver']}{', Vulkan ' + about['vulkan'] if about['vulkan'] else ''}"),
        *[("llama.cpp says", line.replace("|", "·")) for line in about["llama_cpp_says"]],
        ("CPU", f"{about['cpu']}, {about['n_cores']} cores, {about['threads']} threads; {about['memory_bytes'] / 2**30:.0f} GiB of memory"),
        ("model", " ".join(read_lines(work / "model.txt"))),
        ("edgemoe", commit_of(pack, about)),
        ("llama-cpp-python", f"{pack.get('llama_version', '')}, {pack.get('cmake_args', '')}: its kernels for the CPU use AVX2 whatever the CPU has; edgemoe's choose"),
        ("date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
        ("took", ", ".join(read_lines(work / "parts.txt"))),
    ]
    return rows + [("note", line) for line in read_lines(work / "notes.txt")]


def report(options) -> int:
    from bench_device_cache import PARITY_BOUND, table

    work, out = options.work, options.out
    pack, about = read_json(work / "pack.json", {}), read_json(work / "machine.json", {})
    passes = {path.stem: one for path in sorted(work.glob("pass-*.json")) if (one := read_json(path, {})).get("rows")}
    failed, largest = judge(passes, PARITY_BOUND)
    parity = verdict(failed, largest, PARITY_BOUND) if passes else "nothing was measured"
    rows = facts(work, pack, about, parity)
    text = [f"# GPU check: {about['description']}", "", "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    best = max(passes.values(), key=lambda one: (len(one["rows"]), one["about"]["rounds"]), default=None)
    if best:
        options_of = best["about"]
        text += [
            "",
            f"Prompts of {options_of['n_prompt']} tokens, {options_of['n_decode']} timed tokens; {options_of['rounds']} round(s) of all variants, medians; all layers but the routed experts on the GPU. "
            "\"× no slots\": to the mean of the same round's first and last row. In the window: llama_decode and getting its logits. Outside: loading, the prompt and 32 tokens before the timed ones. "
            "D, P: experts loaded on demand and ahead.",
        ]
        # A pass that crashed was tried again in parts.
        names = {row["variant"] for row in best["rows"]}
        text += [line for one in passes.values() if one is best or not names.issuperset(row["variant"] for row in one["rows"]) for line in ("", table(one["rows"]))]
    text = "\n".join(text) + "\n"
    everything = {"parity": parity, "failed": failed, "machine": about, "pack": pack, "facts": rows, "passes": passes}
    for name, content in (("gpu_check.json", json.dumps(everything, indent=1)), ("gpu_check.md", text)):
        partial = out / f"{name}.partial"
        partial.write_text(content)
        os.replace(partial, out / name)
    if options.show:
        print(text)
    return 1 if failed else 0 if passes else 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function, arguments in ((slim, ["wheel"]), (manifest, ["file"]), (device, ["work"]), (report, ["work", "out"])):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        for name in arguments:
            command.add_argument(name, type=Path)
        if function is manifest:
            command.add_argument("pairs", nargs="*")
        if function is device:
            command.add_argument("--device")
        if function is report:
            command.add_argument("--show", action="store_true", help="print the report, too")
    options = parser.parse_args()
    return options.function(options)


if __name__ == "__main__":
    sys.exit(main())
