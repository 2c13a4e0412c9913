"""Counters in words, the line below an answer, and /stats: with a model that is made up where the figures matter, on a terminal where the screen does."""

import re
import signal
from types import SimpleNamespace

import pytest
from terminal import Terminal

from edgemoe import chat, live, tiers
from edgemoe.session import Reply

# 48 of 120 experts were in slots of the device; of the 72 that were looked for in RAM 54 were there.
COUNTS = {
    "n_accesses": 120, "n_computed_on_cpu": 72, "bytes_accessed": 120_000_000, "n_events": 15, "n_pairs": 120, "compute_us": 400_000,
    "n_decode_accesses": 120, "n_decode_hits": 48, "n_decode_demand": 0, "n_decode_computed": 72, "n_proactive": 5, "n_evicted": 4, "n_failed": 0, "bytes_loaded": 5_000_000,
    "stall_us": 0,
    "n_ram_accesses": 72, "n_ram_hits": 54, "n_ram_demand": 18, "n_ram_proactive": 2, "n_ram_evicted": 20, "n_ram_failed": 1, "ram_bytes_read": 20_000_000, "ram_stall_us": 100_000,
    "ram_prompt_bytes_read": 7_000_000,
}  # fmt: skip
NO_RAM = {key: n for key, n in COUNTS.items() if "ram_" not in key}


def test_tiers_that_are_there():
    assert [t.hits() for t in tiers.tiers(COUNTS)] == ["slots 48 of 120 (40%)", "RAM 54 of 72 (75%)"]
    assert [t.name for t in tiers.tiers(NO_RAM)] == ["slots"]
    assert tiers.tiers({"n_accesses": 7}) == [] and tiers.table({}, 3) == []


def test_the_table_has_a_row_for_each_link():
    header, slots, ram = tiers.table(COUNTS, n_tokens=4)
    assert slots.split() == ["slots", "<-", "RAM", "120", "48", "40.0", "0", "5", "4", "0", "5.0", "1.2", "0.00"]
    assert ram.split() == ["RAM", "<-", "disk", "72", "54", "75.0", "18", "2", "20", "1", "20.0", "5.0", "0.10"]
    assert len(header) == len(slots) == len(ram)
    assert tiers.table(COUNTS, n_tokens=0)  # stopped before the first token


def test_the_status_in_one_line():
    assert tiers.status(COUNTS, 4, 0.5) == "8.0 tok/s | slots 48 of 120 (40%) | RAM 54 of 72 (75%) | disk 40 MB/s, 5.0 MB/token | waited 20%"
    assert tiers.status(NO_RAM, 4, 0.5) == "8.0 tok/s | slots 48 of 120 (40%) | waited 0%"
    assert tiers.status({"n_accesses": 7}, 4, 0.5) == "8.0 tok/s"


def test_a_reply_says_what_came_from_disk():
    line = Reply(experts=COUNTS).line()
    assert line.endswith("| RAM 54 hits of 72 (75%), D 18, P 2, 20 MB from disk, 7 MB more for the prompt, 0.10 s waited")
    assert "RAM" not in Reply(experts=NO_RAM).line() and "RAM" not in Reply(experts=COUNTS | {"n_ram_accesses": 0}).line()


# --- the meter: a model that needs 10 ms for a token


class Clock:
    def __init__(self):
        self.llm = SimpleNamespace(n_tokens=100, expert_stats=lambda: {})
        self.now, self.shown = 0.0, []
        self.meter = live.Meter(self.llm, lambda text: self.shown.append((self.now, text)), lambda: self.now)

    def token(self, seconds):
        self.now += seconds
        self.llm.n_tokens += 1
        self.meter.update()


def test_at_most_five_updates_a_second():
    clock = Clock()
    for _ in range(1000):
        clock.token(0.01)
    times = [t for t, _ in clock.shown]
    assert 45 <= len(times) <= 50 and min(b - a for a, b in zip(times, times[1:])) >= 0.199
    assert {text for _, text in clock.shown} == {"100.0 tok/s"}


def test_figures_are_of_the_last_two_seconds():
    clock = Clock()
    for _ in range(100):
        clock.token(0.1)
    for _ in range(100):
        clock.token(0.05)
    assert clock.shown[20][1] == "10.0 tok/s" and clock.shown[-1][1] == "20.0 tok/s"


def test_a_slow_model_is_shown_at_each_token():
    clock = Clock()
    for _ in range(4):
        clock.token(5.0)
    assert [text for _, text in clock.shown] == ["0.2 tok/s"] * 3


# --- the line


def test_the_line_keeps_to_its_row():
    size, out = [(20, 10)], []
    with live.StatusLine(out.append, lambda: size[0]) as line:
        assert out == ["\n\0337\033[1;9r\0338\033[A"]
        line.show("x" * 30)
        assert out[-1] == "\0337\033[10;1H" + "x" * 19 + "\033[K\0338"
        size[0] = (40, 12)  # the window was made larger
        line.show("y" * 30)
        assert out[-1] == "\0337\033[1;11r\0338\0337\033[12;1H" + "y" * 30 + "\033[K\0338"
    assert out[-1] == "\0337\033[r\033[12;1H\033[K\0338"


def test_the_line_goes_whatever_happens():
    out = []
    with pytest.raises(KeyboardInterrupt), live.StatusLine(out.append, lambda: (80, 24)):
        raise KeyboardInterrupt
    assert "\033[r" in out[-1]


def test_no_line_where_nobody_would_see_it(capsys):
    with live.watched(None, True) as update:
        update()
    assert capsys.readouterr() == ("", "")


def test_run_on_a_terminal(models, tmp_path):
    run = ("run", models("qwen3moe", "Q8_0"), "--raw", "-p", "Hello world", "-n", "60", "--temp", "0")
    plain = Terminal(*run, term="xterm", size=(60, 12), cwd=tmp_path)
    wanted = plain.wait_for(r"\[prompt ").split(" s\r\n", 1)[1]  # after the line about loading
    assert plain.close() == 0 and "\033" not in wanted
    t = Terminal(*run, "--stats-live", term="xterm", size=(60, 12), cwd=tmp_path)
    seen = t.wait_for(r"\[prompt ").split(" s\r\n", 1)[1]
    assert t.close() == 0
    assert seen.startswith("\r\n\0337\033[1;11r\0338\033[A\0337\033[12;1Hreading the prompt\033[K\0338")
    assert seen.count("\033[r\033[12;1H\033[K\0338") == 1 and "\033[2J" not in seen and "\033[J" not in seen
    # Beside what stands between saving and restoring the cursor there is the answer, byte by byte.
    assert re.sub("\0337.*?\0338", "", seen.removeprefix("\r\n").replace("\033[A", "", 1)) == wanted


def test_a_long_prompt_has_a_bar(models, tmp_path):
    """Only where it takes several batches; it goes away."""
    terminal = Terminal("run", models("qwen3moe", "Q4_K"), "--raw", "-p", "word " * 700, "-n", "1", term="xterm", size=(100, 30), cwd=tmp_path)
    shown = terminal.wait_for(r"prompt \d+ tokens")
    n_tokens = int(re.search(r"prompt (\d+) tokens", shown)[1])
    assert f"| 0/{n_tokens} [" in shown and re.search(r"\r {60,}\r", shown)
    terminal.close()


def test_ctrl_c_leaves_a_clean_terminal(small_demo, tmp_path):
    t = Terminal("chat", small_demo, "--ctx", "8192", "--stats-live", "--temp", "0", term="xterm", size=(100, 20), cwd=tmp_path)
    t.wait_for("> ")
    t.type("Write a long story about a lighthouse.\n")
    t.wait_for("tok/s")  # the line is there: the answer has begun
    t.process.send_signal(signal.SIGINT)
    assert t.wait_for("stopped by Ctrl-C").count("\033[r\033[20;1H\033[K\0338") == 1
    t.wait_for("> ")
    t.type("/exit\n")
    assert t.close() == 0


def test_no_line_in_a_pipe_or_on_a_dumb_terminal(edgemoe, models, tmp_path):
    run = ("run", models("qwen3moe", "Q8_0"), "--raw", "-p", "Hello world", "-n", "20", "--temp", "0", "--stats-live")
    result = edgemoe(*run)
    assert result.returncode == 0 and "\033" not in result.stdout + result.stderr
    t = Terminal(*run, size=(60, 12), cwd=tmp_path)
    assert "\033" not in t.wait_for(r"\[prompt ")
    assert t.close() == 0


# --- /stats


class Told:
    """A model as /stats sees it."""

    n_tokens = 40
    info = {"filled": 50_000_000, "n_filled": 55, "staging": 2_000_000, "direct": True, "disk_rate": 200_000_000.0, "budget": 60_000_000}

    def __init__(self, counts):
        self.counts = counts

    def n_ctx(self):
        return 512

    def expert_stats(self):
        return self.counts

    def expert_stats_by_layer(self):
        return []

    def ram_info(self):
        return self.info


def statistics(counts=COUNTS, expected=SimpleNamespace(tokens_per_s=9.0, bound="disk-bound")):
    llm = Told(counts)
    return chat._statistics(SimpleNamespace(llm=llm, expected=expected, replies=[Reply(n_answer=3, answer_s=0.25), Reply(n_answer=1, answer_s=0.25)])).splitlines()


def test_stats_compare_with_what_was_expected():
    lines = statistics()
    assert "expected 9 tok/s (disk-bound), measured 8 tok/s over 4 tokens" in lines
    assert "RAM: 55 experts in slots, 50 MB of 60 MB, and 2 MB for prompts; disk 200 MB/s, past the page cache; prompts read 7 MB" in lines
    assert lines[-2:] == tiers.table(COUNTS, 4)[1:]
    assert not [line for line in statistics(expected=None) if "expected" in line]


def test_stats_without_a_ram_tier():
    assert not [line for line in statistics(NO_RAM) if "RAM" in line or "expected" in line]
