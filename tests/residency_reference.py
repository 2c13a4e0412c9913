"""One layer's expert cache, as plainly as it can be said: what the native residency, policies and tier are tested against. Loads take no time.

An event is looked up against the state at its start, and learned from before anything moves. Of the residents the one with the lowest score goes; of equal ones
the least recently used, then the lower id. What a running event uses is pinned and stays.
"""

from collections import Counter
from math import inf

MOST_DECODED = 16   # tokens; an event with more is a prompt


class Layer:
    def __init__(self, n_expert, n_slots, policy="lru", every=8, decay=0.9, bonus=1, early=2, misses="cpu", strict=False, most_inserts=0, seed=True, n_staging=0):
        self.n_expert, self.n_slots = n_expert, min(n_expert, n_slots)
        self.policy, self.every, self.decay, self.bonus, self.next = policy, every, decay, bonus, min(early or every, every)
        self.misses, self.strict, self.most_inserts, self.seed, self.n_staging = misses, strict, most_inserts or inf, seed, n_staging
        self.stage_taken = False
        self.residents, self.pins, self.held, self.counts = set(), Counter(), [], {"decode": Counter(), "prompt": Counter()}
        self.n_events, self.n_uses, self.last_use = 0, Counter(), Counter()        # last use: the number of an event
        self.n_recent_tokens, self.recent, self.popularity = 0, Counter(), Counter()   # of placement: since the last refresh; score without the bonus
        self.score = self.last_use if policy == "lru" else Counter()

    def worth(self, expert):
        return self.score[expert], self.last_use[expert], expert

    def insert(self, expert, kind, phase, keep=(), worthwhile=lambda evicted: True):
        """Whether it came in. Into an empty slot: then nobody, None, is evicted, whose score and uses are 0."""
        evicted = None
        if len(self.residents) == self.n_slots:
            evicted = min((e for e in self.residents if not self.pins[e] and e not in keep), key=self.worth, default=None)
            if evicted is None:
                return False
        if not worthwhile(evicted):
            return False
        self.residents = self.residents - {evicted} | {expert}
        self.counts[phase].update({kind: 1, "evicted": evicted is not None})
        return True

    def begin(self, n_tokens_of, n_tokens):
        """What is in a slot is a hit. The misses of a decode event are loaded where that is the mode, unless the event is larger than the cache: into a slot if they
        may stay there, or else into a staging slot, for this event."""
        phase = "prompt" if n_tokens > MOST_DECODED else "decode"
        hits, loaded, staged = self.residents & n_tokens_of.keys(), set(), set()
        self.pins.update(hits)
        if phase == "decode" or (self.seed and self.policy == "placement"):   # a prompt says what is popular, not what is recent
            self.learn(n_tokens_of, n_tokens, min(1, self.every / n_tokens) if phase == "prompt" else 1)
        if self.misses == "load" and phase == "decode" and len(n_tokens_of) <= self.n_slots:
            n_free = 0 if self.stage_taken else self.n_staging
            for e in sorted(n_tokens_of.keys() - hits, key=lambda e: (-n_tokens_of[e], e)):
                if self.insert(e, "demand", phase, n_tokens_of, lambda evicted: evicted is None or self.policy == "lru" and self.admits(e, evicted)):
                    loaded.add(e)
                elif len(staged) < n_free:
                    staged.add(e)
                    self.counts[phase].update(demand=1)
        if self.misses == "load" and phase == "prompt" and not self.stage_taken:   # the most used of a prompt
            staged = set(sorted(n_tokens_of.keys() - hits, key=lambda e: (-n_tokens_of[e], e))[:self.n_staging])
            self.counts[phase].update(demand=len(staged))
        self.stage_taken |= bool(staged)
        self.pins.update(loaded)
        self.counts[phase].update(events=1, accesses=len(n_tokens_of), hits=len(hits), computed=len(n_tokens_of) - len(hits | loaded | staged))
        return n_tokens_of, phase, hits | loaded, staged

    def end(self, n_tokens_of, phase, pinned, staged):
        self.pins.subtract(pinned)
        if staged:
            self.stage_taken = False
        if phase == "prompt" and not self.seed:
            return
        if self.policy == "lru" and phase == "decode":
            self.update(n_tokens_of, phase, staged)
        if self.policy == "placement" and self.n_recent_tokens >= self.next:
            self.refresh(phase)
        for e in sorted(n_tokens_of, key=lambda e: (-n_tokens_of[e], e)):   # empty slots: the most used first
            if e not in self.residents and len(self.residents) < self.n_slots:
                self.insert(e, "proactive", phase)

    def admits(self, expert, evicted):
        return not self.strict or self.n_uses[expert] > self.n_uses[evicted]

    def learn(self, n_tokens_of, n_tokens, weight):
        """weight: a prompt is worth as many tokens as lie between two refreshes."""
        self.n_events += 1
        self.n_recent_tokens += n_tokens
        self.n_uses.update(n_tokens_of)
        for e, n in n_tokens_of.items():
            self.recent[e] += n * weight
        for e in n_tokens_of:
            self.last_use[e] = self.n_events

    def update(self, n_tokens_of, phase, staged):
        """The misses of an event come in, and none of its members goes. Strict: only for one that was used less. One that is staged already is no new load."""
        n_inserted = 0
        for e in sorted(n_tokens_of, key=lambda e: (-n_tokens_of[e], e)):   # the most used first
            if e not in self.residents and n_inserted < self.most_inserts:
                n_inserted += self.insert(e, "moved" if e in staged else "proactive", phase, n_tokens_of, lambda evicted: self.admits(e, evicted))

    def refresh(self, phase):
        """The best by score come in, each for the resident with the lowest, if that is lower. This is before the next event: members of the last may go."""
        for e in range(self.n_expert):
            self.popularity[e] = self.recent[e] + self.decay * self.popularity[e]
            self.score[e] = self.popularity[e] + self.bonus * (e in self.residents)
        self.n_recent_tokens, self.recent, self.next = 0, Counter(), min(2 * self.next, self.every)
        for e in sorted(range(self.n_expert), key=self.worth, reverse=True)[:self.n_slots]:
            if e not in self.residents:
                self.insert(e, "proactive", phase, worthwhile=lambda evicted: self.score[e] > self.score[evicted])

    # As edgemoe_replay_event, _hold and _release.

    def event(self, n_tokens_of, n_tokens=1):
        self.end(*self.begin(n_tokens_of, n_tokens))

    def hold(self, n_tokens_of, n_tokens=1):
        self.held.append(self.begin(n_tokens_of, n_tokens))

    def release(self):
        for event in self.held:
            self.end(*event)
        self.held = []
