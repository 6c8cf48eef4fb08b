"""Who asks and who leaves in an elastic pool, as lists of what happened: slow, and close to the words of the rule."""


class StepSwitches:
    """verl V1's switch: the history of a run, from which each decision is computed anew."""

    def __init__(self, batch, minibatches, standalone, poll_s, **keys):
        self.batch, self.minibatches, self.standalone, self.poll_s = (
            batch,
            minibatches,
            standalone,
            poll_s,
        )
        self.keys = {
            "ratio": 0.4,
            "adaptive": True,
            "up": 0.05,
            "down": 0.03,
            "release": 2,
            "window": 3,
        } | keys
        self.steps = [[]]  # of each step, the (seconds, missing groups) of its updates
        self.costs = {"rollout": [], "trainer": []}

    def wait(self, seconds, missing):
        self.steps[-1].append((seconds, missing))

    def switch(self, to, seconds):
        self.costs[to].append(seconds)

    def ratio(self):
        """The ratio after all steps that are over."""
        ratio, idles = self.keys["ratio"], []
        if not self.keys["adaptive"]:
            return ratio
        for step in self.steps[:-1]:
            idles.append(sum(seconds for seconds, _ in step) > self.poll_s)
            last = idles[-self.keys["release"] :]
            if len(last) == self.keys["release"] and all(last):
                ratio = min(1.0, ratio + self.keys["up"])
            if len(last) == self.keys["release"] and not any(last):
                ratio = max(1 / self.minibatches, ratio - self.keys["down"])
        return ratio

    def threshold(self):
        smallest = self.batch // self.minibatches
        return min(max(round(self.ratio() * self.batch), smallest), self.batch)

    def end_step(self, ready, last):
        self.steps.append([])
        missing = self.threshold() - ready
        if last or missing <= 0:
            return False
        sums = [(sum(s for s, _ in step), sum(n for _, n in step)) for step in self.steps]
        waited = [(seconds, groups) for seconds, groups in sums if seconds > 0 and groups > 0]
        if not waited or not all(self.costs.values()):
            return True
        group_s = sum(s for s, _ in waited) / sum(n for _, n in waited)
        recent = [costs[-self.keys["window"] :] for costs in self.costs.values()]
        cost_s = sum(sum(costs) / len(costs) for costs in recent)
        return missing * group_s * (1 - self.standalone) > cost_s


class DynamicSchedules:
    """verl's dynamic schedule, cycle after cycle."""

    def __init__(self, cycle, ratio, policy):
        self.cycle, self.ratio, self.policy = cycle, ratio, policy
        self.waits, self.switches, self.costs, self.group_s = [], [], [], 1000.0

    def threshold(self):
        return int(self.cycle * self.ratio)

    def lends(self, surplus):
        gap = self.ratio * self.cycle - surplus
        if self.policy == "fixed_ratio":
            return gap > 0
        if gap <= 0:
            return False
        seconds, missing = sum(s for s, _ in self.waits), sum(n for _, n in self.waits)
        if seconds > 0 and missing > 0:
            self.group_s = seconds / missing
        last = self.costs[-3:]
        return gap * self.group_s > (sum(last) / len(last) if last else 10.0)

    def end_cycle(self):
        missing = sum(n for _, n in self.waits)
        if self.policy == "default":
            if sum(self.switches) > 0:
                self.costs.append(sum(self.switches))
            if missing == 0:
                self.ratio = self.ratio - 0.02
            else:
                self.ratio = min(1.0, self.ratio + min(max(missing / self.cycle, 0.02), 0.1))
        self.waits, self.switches = [], []


def released(workers, running, most_running, train, sizes):
    """RLinf: the workers that leave, by trying every number of them from the largest on."""
    if running == 0:
        return workers
    for number in range(workers - 1, 0, -1):
        enough_stay = (workers - number) * most_running >= running
        if enough_stay and train + number in sizes:
            return number
    return 0


def scattered(moving, running, expected):
    """RLinf's "sequential": fill each worker but the last to the expected number, then the last."""
    left, places = list(moving), []
    for place, load in enumerate(running[:-1]):
        while left and load < expected:
            places.append(place)
            load += left.pop(0)
    return places + [len(running) - 1] * len(left)
