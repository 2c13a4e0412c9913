"""Where the bytes of a model go: the answer to `edgemoe inspect`, and the line printed when a model is loaded."""

from __future__ import annotations

from edgemoe.machine import human_bytes, memory
from edgemoe.package import Source
from edgemoe.ram_plan import RamPlan

KIND = {"dense": "dense GGUF", "stacked": "GGUF with stacked experts", "package": "edgemoe package"}


def describe(source: Source) -> dict:
    """All that is known of a model without loading it; sizes in bytes."""
    counts = sorted({layer.n_expert for layer in source.layers})
    used = source.integer("expert_used_count")
    layers = [
        {
            "layer": layer.layer,
            "n_expert": layer.n_expert,
            "bytes_per_expert": layer.bytes_per_expert,
            "projections": [{"name": p.name, "type": p.type, "n_in": p.n_in, "n_out": p.n_out, "bytes": p.bytes} for p in layer.projections],
        }
        for layer in source.layers
    ]
    return {
        "path": source.path,
        "kind": source.kind,
        "architecture": source.architecture,
        "fingerprint": source.fingerprint,
        "n_layers": source.integer("block_count"),
        "n_expert_layers": len(source.layers),
        "n_expert": counts[0] if len(counts) == 1 else counts,
        "n_expert_used": used if used >= 0 else None,
        "expert_bytes": source.expert_bytes,
        "dense_bytes": source.dense_bytes,
        "expert_bytes_per_token": sum(max(used, 0) * layer.bytes_per_expert for layer in source.layers),
        "usable_memory": memory().usable,
        "layers": layers,
    }


def report(source: Source) -> str:
    """describe() for a human."""
    d = describe(source)
    rows = [("model", f"{source.path}: {KIND[source.kind]}, architecture {source.architecture}")]
    if not source.layers:
        rows.append(("experts", "none: a dense model. There is nothing to manage, edgemoe runs it as llama.cpp does"))
    else:
        used = f", {d['n_expert_used']} used per token" if d["n_expert_used"] else ""
        rows.append(("layers", f"{d['n_layers']}, {d['n_expert_layers']} of them with routed experts: {_counts(d['n_expert'])} each{used}"))
        rows += [("expert" if i == 0 else "", line) for i, line in enumerate(_shapes(source))]
        rows.append(("experts", f"{human_bytes(source.expert_bytes):>10}  in RAM (page cache), computed on the CPU where they lie"))
    rows.append(("dense", f"{human_bytes(source.dense_bytes):>10}  in RAM (page cache), mapped by llama.cpp"))
    if d["expert_bytes_per_token"]:
        rows.append(("per token", f"{human_bytes(d['expert_bytes_per_token']):>10}  of experts are read"))
    rows.append(("memory", _fit(source.expert_bytes + source.dense_bytes, d["usable_memory"])))
    if source.fingerprint:
        rows.append(("made from", source.fingerprint))
    return "\n".join(f"{name:<10} {text}" for name, text in rows)


def load_line(source: Source, seconds: float, has_slots: bool = False, ram: RamPlan | None = None) -> str:
    """One line that says where every byte went; what is in slots of a device, the plan of these has said."""
    if not source.layers:
        return f"{source.path}: {source.architecture}, dense, nothing to manage: {human_bytes(source.dense_bytes)} mapped, loaded in {seconds:.2f} s"
    n_expert = _counts(sorted({layer.n_expert for layer in source.layers}))
    where = "computed on the CPU where they lie"
    if ram and ram.mode == "slots":
        where = f"{human_bytes(ram.budget_bytes)} of them at a time in RAM, computed on the CPU, the others on disk"
    return (
        f"{source.path}: {source.architecture}, {len(source.layers)} layers of {n_expert} experts: {human_bytes(source.expert_bytes)}, {'those in no slot ' if has_slots else ''}{where}, "
        f"{human_bytes(source.dense_bytes)} dense, loaded in {seconds:.2f} s"
    )


def _counts(counts: int | list[int]) -> str:
    counts = counts if isinstance(counts, list) else [counts]
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _shapes(source: Source) -> list[str]:
    """One line per kind of expert; most models have one or two (a quantisation mix)."""
    kinds: dict[tuple, list[int]] = {}
    for layer in source.layers:
        shape = tuple((p.name.split(".")[2].removeprefix("ffn_").removesuffix("_exps"), p.type, p.n_in, p.n_out) for p in layer.projections)
        kinds.setdefault((layer.bytes_per_expert, shape), []).append(layer.layer)
    return [
        f"{human_bytes(size):>10}  " + ", ".join(f"{name} {type_} [{n_in} x {n_out}]" for name, type_, n_in, n_out in shape)
        + (f"  ({len(layers)} layers)" if len(kinds) > 1 else "")
        for (size, shape), layers in kinds.items()
    ]


def _fit(needed: int, usable: int) -> str:
    if needed <= usable:
        return f"{human_bytes(needed):>10}  of {human_bytes(usable)} usable: fits"
    return f"{human_bytes(needed):>10}  of {human_bytes(usable)} usable: does NOT fit; `edgemoe plan` shows what will be read from disk"
