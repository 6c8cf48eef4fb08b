"""The records of engines: a request, an engine's totals, a node of the prefix cache, and the limits
of a pass.

`Request` and `Totals` name the fields of structured arrays (`fields_of`), one record a request, one
for all totals. Compiled code reads a field as an attribute: `r[slot].computed`, `t.free_blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.speculation.bandit import BanditState
from simrl.speculation.decoding import Draft, Gauges, Ints, Records, fields_of


class Status(IntEnum):
    """Place of a request, for its caller: in the queue, in the batch, out of it at a pause, or gone
    for good (ended or aborted). An asynchronous scheduler knows it a pass later (`once_more`)."""

    WAITING = 0
    RUNNING = 1
    PAUSED = 2
    LEAVING = 3


WAITING, RUNNING, PAUSED, LEAVING = Status
# A request's slot, the time of the boundary at which it stopped, and how: END, PAUSE or WATCH.
Stop = tuple[int, float, int]
# Kinds of stops: the response ends; the request leaves the batch and keeps its cache; the caller is
# informed, no more.
END, PAUSE, WATCH = range(3)
# Why a request lost its cache: it moved to another worker, was preempted, got new weights, or a
# drafter started that needs it.
MOVED, PREEMPTED, RELOADED, REDRAFTED = np.arange(4)
FOUND_AGAIN = np.bool_(True)
# numba compiles a function anew for each Python integer that it is called with.
NEVER: Any = np.int64(2**62)
NO_PLACE: Any = np.int64(-1)
UNKNOWN = -2
# Kinds of nodes.
NO_NODE, PROMPT, LAST, OWN = range(4)


class Node:
    """One entry a node."""

    node_kind: int
    node_key: int  # of the prompt, or of the sample; -1 of one whose request alone may find it
    node_blocks: int  # that hold the beginning of the text
    node_most: int  # blocks of the whole text of a prompt
    node_refs: int  # requests that have the blocks …
    node_held: int  # … of which these are paused or waiting: if all are, the blocks can be had
    node_users: int  # requests that may find it, and copies of a prompt's last block
    node_prompt: int  # the prompt of which it is the last block
    node_copy: int  # of a prompt: the first copy of its last block, + 1; 0: none
    node_bucket: int  # the first node, + 1, whose key leaves this remainder (`node_of`) …
    node_next: int  # … and the next one, + 1, or the next copy of a last block
    node_before: int  # nodes beside it in the list, -1 at an end …
    node_after: int
    node_dead: int  # … and dead blocks behind it
    node_spare: int  # `n_spare` entries without a node, the last one to be used next


class CacheTotals:
    """The list, and what was found."""

    prefix_caching: int
    hold_paused: int  # whether a paused request holds its blocks
    block_size: int
    last_apart: int  # whether nobody finds a prompt's last token
    n_spare: int
    list_first: int  # -1: the list has no node
    list_last: int
    list_dead: int  # dead blocks ahead of the first node
    listed_blocks: int
    lookup_tokens: int  # known tokens of the requests that were admitted …
    hit_tokens: int  # … of which these were found


class Request(Draft, Node):
    """One entry a request (a slot), but for nodes, and for the lists at the end, whose entries are
    slots.

    What every pass reads and writes comes first, on a few cache lines.
    """

    running: int  # `n_running` slots in order of admission
    generated: int
    computed: int  # tokens with KV
    blocks: int  # that it holds
    prompt: int
    stop_at: int  # generated tokens at which it next leaves the batch …
    watch_at: int  # generated tokens at which the caller is informed
    scheduled: int  # tokens of the pass that is being scheduled
    complete: int  # whether its last pass left nothing of its context to compute: it decodes …
    gained: int  # … and the tokens of that pass, if it decoded too; else 0
    # draft tokens of its last pass that were rejected; an async scheduler does not know it yet
    rejected: int
    status: Status
    # whether it takes part in one more pass, scheduled before it was paused or left; what is paused
    # may wait again meanwhile
    once_more: int
    response: int
    stop_kind: int  # … by END or PAUSE
    reached: int  # tokens that had been computed when the cache was last lost …
    lost_by: int  # … and why: MOVED, PREEMPTED, RELOADED or REDRAFTED
    # tokens of the pass in flight, if the scheduler is async and there are window groups
    in_flight: int
    seen_at: int  # an async scheduler sees it waiting when that many passes are over
    first_token_s: float
    last_token_s: float
    pinned_until_s: float  # of a paused one whose blocks nobody may have; else 0
    # With a prefix cache (`engine.prefix_cache`):
    sample_key: int  # -1 of one whose text nobody asks for after its end
    prompt_node: int  # -1: its prompt is not shared …
    shared: int  # … blocks of it that the request holds …
    last_node: int  # … and the copy of its last block that it holds; -1 if none
    first_own: int  # block from which on its text is its own
    own_node: int  # what it left in the list; -1 if nothing, UNKNOWN until it is first in line
    covering: int  # whether it computes its prompt
    continues: int  # whether its text may be asked for after its end
    kept: int  # tokens that SGLang keeps in its cache if it retracts the request

    ticket: int  # of a request of a group (`engine.fleet`); -1 of one whose stops are events
    waiting: int  # a ring of `n_waiting` slots from `waiting_head` on
    # `n_holding` slots that hold blocks without running (paused, or waiting again), oldest pause
    # first
    holding: int
    stopped: int  # `n_stopped` slots that stopped in the last pass …
    stopped_kind: int  # … and how
    # `n_leaving` slots that stopped in the last pass, which an async scheduler does not know yet …
    leaving: int
    leaving_kind: int  # … how …
    leaving_at: int  # … and how many running requests are ahead; NO_PLACE: it has none beside them
    free: int  # `n_free` slots without a request, the last one to be used next


Requests = Sequence[Request]


class PassWork:
    """The work of the pass that is scheduled, and its seconds."""

    query: int  # tokens in all
    sampled: int  # positions that need logits
    prefill: int  # prefill tokens …
    prefill_work: float  # … and their attention work
    decoding: int  # decoding sequences …
    decode_kv: int  # … the tokens that they attend to …
    drafted: int  # … their draft tokens …
    accepted: int  # … and those accepted
    proposing: int  # requests that draft …
    levels: int  # … the draft steps of the one that takes most …
    proposed: int  # … of these, requests in the pass …
    proposed_drafted: int  # … their draft tokens …
    proposed_accepted: int  # … and those accepted
    modelled: int  # requests in the pass with a tree …
    modelled_accepted: int  # … and the accepted tokens of these
    flying: int  # requests in the pass of a decoupled drafter …
    lacking: int  # … those that it has yet to prefill in its next pass …
    lacking_tokens: int  # … and their tokens
    speculates: int  # whether the pass verifies drafts …
    arm: int  # … and the strategy of its trees
    draft_s: float  # of the drafting round before the pass
    straggler_s: float  # what decoding alone waits for its longest sequences …
    straggler_of_all_s: float  # … and the pass
    # of the pass (of planned ones: of them all) without the other ranks of lock step …
    own_s: float
    decoding_s: float  # … of its decoding alone, without drafts …
    verifying_s: float  # … and what the draft tokens add
    lengths: int  # the sum of the decoding sequences' in the first of planned passes …
    mean_kv: float  # … their mean in the next one …
    cell: int  # … its cell in the attention's grid …
    cell_kv: float  # … where that begins …
    cell_s: float  # … the attention there …
    slope_s: float  # … a token more …
    cell_end_kv: float  # … and where it ends
    fixed_s: float  # of planned passes without attention …
    own_fixed_s: float  # … and without the other ranks of lock step


class Spent:
    """Uses of the passes, in the order of `simrl.result.result.Work`.

    The seconds of all passes are split by what they went to. `decode_s` is what passes would take
    without anything else. What prefill adds is split by its tokens: computed for the first time, or
    again, by why the cache was lost. Drafting and verification are split by accepted and rejected
    draft tokens. What a slow worker takes longer is `slowed_s` alone.
    """

    decode_s: float
    prefill_s: float
    recompute_moved_s: float
    recompute_preempted_s: float
    recompute_reloaded_s: float
    recompute_redrafted_s: float
    drafts_accepted_s: float
    drafts_rejected_s: float
    slowed_s: float
    lock_step_s: float  # what a rank waits for the other ranks
    decodes: int  # sequences that decoded, summed over the passes
    slot_s: float  # seconds of the passes, times the requests that run in each


class Totals(PassWork, Gauges, CacheTotals, Spent):
    """The state of an engine, or of one of its ranks, and totals since it was made."""

    now_s: float
    slowdown: float
    admitting: int
    n_running: int
    n_waiting: int
    waiting_head: int
    n_holding: int
    n_stopped: int
    n_free: int
    n_leaving: int
    leaving_places: int  # that these have beside the running ones
    n_once_more: int  # running or waiting ones that take part in one more pass
    async_scheduling: int
    ahead: int  # whether the pass to come is scheduled already
    # Draft tokens, to be rejected, of an admitted request that has one token to compute:
    padding: int
    # SGLang's: admission is over until fewer requests than this run (0: it is not) …
    full_at: int
    # … share of the tokens to come that running ones are taken to generate (0: the share at the start) …
    token_ratio: float
    decays: int  # … and passes that decoded since it was set
    # vLLM's, where passes that compute contexts are some passes apart: whether the pass to come
    # computes none …
    decodes_alone: int
    next_prefill: int  # … passes that are over when the next one may …
    crowded: int  # … whether requests were left waiting when one could, so that nobody is put off …
    wave: int  # … and of ranks: passes that were over when none had a request
    free_blocks: int
    held_blocks: int

    passes: int
    generated_tokens: int
    prefill_tokens: int
    preemptions: int


REQUESTS, TOTALS = fields_of(Request), fields_of(Totals)


class Sibling:
    """Who has a row of the trace, from whose tokens the others of its group draft."""

    slot: int  # of the latest request for it that drafts so; -1: none runs …
    tokens: int  # … and it left with that many, which stay known


SIBLING = fields_of(Sibling)


class Drafting(NamedTuple):
    """Memory of engines that draft, beside their requests."""

    bandits: BanditState  # of each row
    siblings: Records  # (rows, rows of the trace): a `Sibling` of each
    readable: Ints  # scratch: how many tokens of each row of a group may be read
    meanwhile: Ints  # scratch, (2, 2 × longest window + 2): see `engine.drafts`


class RecordedPass:
    """A pass in the record of a run; see `fields_of`."""

    seconds: float  # that it takes, as a replay measured them; 0: its profiled ones
    began_s: float
    prefill: int  # tokens of contexts
    decodes: int


RECORDED = fields_of(RecordedPass)


class Engines(NamedTuple):
    """The arrays of some engines: a row a data-parallel rank, the rows of an engine side by side; a
    column a slot."""

    requests: NDArray[Any]  # (rows, slots)
    totals: NDArray[Any]  # (rows,)
    scratch: Ints  # (slots or more,)
    drafting: Any  # `Drafting` of engines that draft, else None
    record: Records  # (rows, passes): the first passes of each engine of one rank, if recorded


class Columns(dict[str, NDArray[Any]]):
    """The fields of records, each looked up once."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def __missing__(self, name: str) -> NDArray[Any]:
        self[name] = column = self._records[name]
        return column


class Limits(NamedTuple):
    """Bounds of a pass. Names as in vLLM; `kv_blocks` blocks of `block_size` tokens hold the KV
    cache.

    Layers that keep unlike things are in groups that share these blocks, as in vLLM: a sequence has
    a block for each `block_size` tokens in each of the `full_groups`, of the last `window_tokens`
    alone in each of the `window_groups`, and `state_blocks` for its states, however long it is.
    With windows or states, no prefix cache is modelled.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_blocks: int
    async_scheduling: bool = False
    prefix_caching: bool = False
    # whether paused requests keep their blocks; None: without a prefix cache
    hold_paused: bool | None = None
    # data-parallel ranks in lock step (`engine.step`); all other limits are of a rank
    dp: int = 1
    graph_tokens: int = 0  # up to which ranks are padded to the largest, for its CUDA graph
    full_groups: int = 1
    window_groups: int = 0
    window_tokens: int = 0
    state_blocks: int = 0
    # Blocks that stay free where a request is admitted beside others; and that many passes with
    # contexts to compute are apart, while requests decode (vLLM 0.33: `watermark`,
    # `prefill_schedule_interval`)
    watermark_blocks: int = 0
    prefill_interval: int = 1
    # With `sglang`, prompts go first and alone, and admission keeps room for what is generated: the
    # most tokens of a response, of these the most that count, the share of these at the start, and
    # whether who finds most of its context starts first
    sglang: bool = False
    max_new_tokens: int = 0
    clip_max_new_tokens: int = 4096
    start_ratio: float = 0.7
    longest_prefix_first: bool = False

    @property
    def kv_tokens(self) -> int:
        """Tokens of a cache of these blocks, as vLLM counts them: each group of layers keeps its
        own block of a token."""
        return (
            self.kv_blocks
            // (self.full_groups + self.window_groups + self.state_blocks)
            * self.block_size
        )
