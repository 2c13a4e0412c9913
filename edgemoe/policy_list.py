"""What each policy is, in a line, with its parameters and where it comes from: `edgemoe policies`."""

from __future__ import annotations

import textwrap

from edgemoe import lossy, policies

ROUTER_PAPER, SAEM = "Cache-Aware Router paper", "SAEM"
STAGE = {
    "decay": "of the score so far",
    "bonus": "of residents, in tokens",
    "most": "experts that a boundary brings in, of all layers, the most valuable first; 0: no limit",
    "longest": "tokens after which a stage ends in any case; 0: never",
}
ABOUT = {  # name: (what it is, its parameters, source)
    "lru": ("keeps what was used last", {}, "textbook"),
    "lfu": ("keeps what most tokens of the sequence used", {}, "textbook"),
    "lrfu": ("recency and frequency in one score", {"lambda": "how fast a use fades, per token: 0 is LFU, 1 is LRU"}, "Lee et al. 2001"),
    "frequency": (
        "counts over all sequences that are halved now and then",
        {"halve": "accesses between two halvings", "strict": "1: a miss comes in only if it was used more often than what goes"},
        "inference engines",
    ),
    "least-stale": ("what the last pass over the layers did not touch goes first", {"ahead": "layers whose experts of the token before are brought in"}, "SpecMD"),
    "belady": ("the expert needed furthest in the future goes", {"force": "1: misses must be kept; 0: only what is needed sooner"}, "Belady 1966"),
    "placement": (
        "a set chosen by counts that moves every so many tokens only",
        {"every": "tokens between two choices", "decay": "of the score so far", "bonus": "of residents, in tokens", "early": "tokens until the first choice; 0: every"},
        "control of " + SAEM,
    ),
    "stage": ("a set chosen at each boundary between stages, by what the finished one used", STAGE, SAEM),
    "stage+lru": ("the same at boundaries, and LRU between them", STAGE, SAEM),
    "oracle": ("the set that the coming stage will use most", {}, SAEM),
    "foresight": ("the set that the coming tokens will use most", {"every": "tokens between two choices"}, "perfect placement"),
    "static": ("the set that the training text used most, from the first token on", {}, "pinned experts"),
    "temporal": ("keeps what the router chose and what it is predicted to choose for the next token", {}, ROUTER_PAPER),
    "spatio-temporal": ("temporal, and brings in what the layer before foretells", {"R": "most loads before a layer; 0: twice as many as a token uses"}, ROUTER_PAPER),
    "spatio": ("brings in what the layer before foretells; keeps by the router's probabilities", {"R": "most loads before a layer; 0: twice as many as a token uses"}, ROUTER_PAPER),
    "promoe": ("LRU, and brings in what a predictor expects of the next three layers", {"k": "experts for each layer; 0: as many as a token uses"}, "ProMoE"),
    "mixtral-offloading": ("LRU, with the likeliest of the next layer waiting beside the cache", {"k": "how many wait"}, "Eliseev & Mazur 2023"),
    "st-moe": ("like ST-MoE: what followed each expert, and what the next layer used for the token before", {"k": "experts for each layer; 0: as many as a token uses", "weight": "of the token before"}, "ST-MoE"),
    "step": ("like STEP: a moving average and the layer before, each trusted as much as it was right", {"k": "experts for each layer; 0: as many as a token uses"}, "STEP"),
    "finemoe": ("looks up the most similar token of the training text and brings in what it used", {}, "FineMoE"),
    "moe-infinity": ("looks up the most similar sequence of the training text and brings in what it used", {"k": "experts after each layer; 0: as many as a token uses"}, "MoE-Infinity"),
    lossy.NAME: (
        "routing masked to a set that changes when it captures too little; changes the output, listed apart",
        {"window": "tokens that are averaged", "threshold": "captured share of the router's mass under which the set changes"},
        "like Temporally-Extended MoE",
    ),
}


def listing() -> list[dict]:
    """name, parameters (name: {default, about}), about, source, learns (tables), bound (knows the future), lossy; of every policy."""
    found = []
    settings = {**policies.defaults(), lossy.NAME: f"{lossy.NAME}:" + ",".join(f"{k}={v:g}" for k, v in lossy.DEFAULTS.items())}
    for name, text in settings.items():
        about, explained, source = ABOUT.get(name, ("", {}, ""))
        values = dict(p.split("=") for p in filter(None, text.partition(":")[2].split(",")))
        found.append({
            "name": name,
            "parameters": {key: {"default": float(value), "about": explained.get(key, "")} for key, value in values.items()},
            "about": about,
            "source": source,
            "learns": list(policies.LEARNED.get(name, ())),
            "bound": name in policies.CHEATS,
            "lossy": name == lossy.NAME,
        })
    return found


def text(width: int = 110) -> str:
    """For a terminal."""
    lines = []
    for p in listing():
        marks = [m for m, there in (("needs training", p["learns"]), ("a bound: knows the future", p["bound"]), ("changes the output", p["lossy"])) if there]
        note = f" ({', '.join([*marks, p['source']])})"
        lines += textwrap.wrap(f"{p['name']:<20}{p['about']}{note}", width, subsequent_indent=" " * 20)
        lines += [f"{'':<20}  {key}={value['default']:g}: {value['about']}" for key, value in p["parameters"].items()]
    lines += ["", "NAME:key=value,... sets parameters; in `edgemoe simulate` key=1|2|3 tries each. FILE.py:function is a score function of your own."]
    return "\n".join(lines)
