"""What becomes of misses is chosen by what was measured: these tests play a machine with known speeds and look at the choice."""

import pytest

from edgemoe import _native

N_PAIRS = 8


class Choice:
    def __init__(self, misses):
        self.ffi, self.lib = _native.load()
        self.handle = self.lib.edgemoe_choice_open(misses.encode())
        assert self.handle, _native.last_error()

    @property
    def mode(self):
        return _native.text(self.lib.edgemoe_choice_mode(self.handle))

    def steps(self, n, seconds):
        """n steps on a machine where a step takes seconds[mode]. Returns the modes they ran in."""
        modes = []
        for _ in range(n):
            modes.append(self.mode)
            self.lib.edgemoe_choice_step(self.handle, seconds[self.mode], N_PAIRS)
        return modes

    def rates(self, cpu, load):
        for _ in range(100):  # averages forget
            self.lib.edgemoe_choice_rates(self.handle, cpu, load)

    def n_to_load(self, n):
        return self.lib.edgemoe_choice_n_to_load(self.handle, n)

    def n_to_stream(self, tokens, pairs_per_second, experts_per_second, load_seconds):
        return self.lib.edgemoe_choice_n_to_stream(self.handle, pairs_per_second, experts_per_second, self.ffi.new("int32_t[]", tokens), len(tokens), load_seconds)


@pytest.fixture
def choice():
    made = []

    def make(misses="auto"):
        made.append(Choice(misses))
        return made[-1]

    yield make
    for c in made:
        c.lib.edgemoe_choice_close(c.handle)


MODES = ("cpu", "load", "split", "off")
ASKED = 64 + 4 * 10  # steps until the first question is answered: the slots fill, and each mode is tried for 10


@pytest.mark.parametrize("fastest", MODES)
def test_auto_tries_all_and_keeps_the_fastest(fastest, choice):
    c = choice()
    tried = c.steps(ASKED + 1, {mode: 1.0 if mode == fastest else 1.5 for mode in MODES})
    assert tried[:64] == ["cpu"] * 64 and set(tried) == set(MODES)
    assert c.mode == fastest and c.steps(200, dict.fromkeys(MODES, 1.0)) == [fastest] * 200


def test_a_forced_mode_is_never_left(choice):
    for mode in ("cpu", "load"):
        c = choice(mode)
        assert set(c.steps(2000, {"cpu": 1, "load": 5, "split": 0.1, "off": 0.1})) == {mode} and c.n_to_load(6) == (0 if mode == "cpu" else 6)


def test_a_small_advantage_does_not_move_it(choice):
    c = choice()
    c.steps(ASKED + 1, {"cpu": 1.0, "load": 0.97, "split": 2.0, "off": 1.5})
    assert c.mode == "cpu"


def test_a_hopeless_mode_is_given_up_after_one_step(choice):
    c = choice()
    tried = c.steps(ASKED + 1, {"cpu": 1.0, "load": 30.0, "split": 15.0, "off": 1.2})
    assert c.mode == "cpu" and tried.count("load") <= 4 and tried.count("split") <= 4


def test_it_asks_again_later_and_less_and_less_often(choice):
    c = choice()
    modes = c.steps(3000, {"cpu": 1.0, "load": 1.5, "split": 1.5, "off": 1.5})
    questions = [i for i in range(1, len(modes)) if modes[i] == "load" and modes[i - 1] != "load"]
    gaps = [b - a for a, b in zip(questions, questions[1:])]
    assert len(gaps) >= 2 and gaps == sorted(gaps) and gaps[-1] > 1.5 * gaps[0]


def test_it_follows_a_machine_that_changes(choice):
    c = choice()
    c.rates(cpu=10e9, load=5e9)
    c.steps(ASKED + 1, {"cpu": 1.0, "load": 1.5, "split": 1.5, "off": 1.5})
    assert c.mode == "cpu"
    c.rates(cpu=2e9, load=5e9)  # something else takes the CPU
    c.steps(400, {"cpu": 3.0, "load": 1.0, "split": 1.5, "off": 4.0})
    assert c.mode == "load"


def test_a_split_lets_both_sides_end_together(choice):
    c = choice()
    c.steps(ASKED + 1, {"cpu": 2.0, "load": 2.0, "split": 1.0, "off": 3.0})
    assert c.mode == "split"
    c.rates(cpu=12e9, load=4e9)
    assert [c.n_to_load(n) for n in (0, 1, 4, 8)] == [0, 0, 1, 2]
    c.rates(cpu=4e9, load=12e9)
    assert c.n_to_load(8) == 6


def test_unknown_ways_are_refused(choice):
    lib = _native.load()[1]
    assert not lib.edgemoe_choice_open(b"sometimes")
    assert _native.last_error() == "misses: sometimes, wanted cpu, load or auto"


def test_streaming_stops_where_it_no_longer_pays(choice):
    c = choice()
    tokens = [100, 50, 20, 10, 4, 2, 1, 1]
    # 1000 pairs per second on the CPU: 0.188 s for all. A load takes 10 ms, the device 1 ms per expert.
    # Two leave 38 ms to the CPU, and 40 ms in all; three leave 18 beside 30 of loads, 33 in all; with four the loads alone take 40.
    assert c.n_to_stream(tokens, 1000, 1000, 0.010) == 3
    # A link four times as fast takes more.
    assert c.n_to_stream(tokens, 1000, 1000, 0.0025) == 4
    slow = choice()
    assert slow.n_to_stream(tokens, 1000, 16, 0.010) == 1  # 62.5 ms on the device for the 100 ms that the first takes here, but not for the 50 ms of the second
    slower = choice()
    assert slower.n_to_stream(tokens, 1000, 8, 0.010) == 0


def test_streaming_is_measured_before_it_is_used(choice):
    c = choice()
    assert c.n_to_stream([9, 9, 9, 9], 0, 0, 0) == 0  # not even the CPU is known
    assert c.n_to_stream([9, 9, 9, 9], 1000, 0, 0) == 2  # a probe
    hopeless = choice()
    asked = [hopeless.n_to_stream([9, 9, 9, 9], 1000, 1, 0.5) for _ in range(200)]
    assert set(asked) == {0, 1} and 2 <= asked.count(1) <= 4  # now and then one, in case the machine has changed
