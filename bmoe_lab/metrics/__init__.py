"""Numbers of one routing trace.

Every function takes a trace (:mod:`bmoe_lab.schema`) and returns a labelled array. ``phase``
selects the tokens and is part of the result's name: prefill and decode never share a number by
accident. Cells that did not route are left out; a group with nothing to count is NaN, and so is a
group that holds an unknown weight.
"""

from __future__ import annotations

from bmoe_lab.metrics.cache import (
    byte_hit_rate,
    first_of_load,
    hit_rate,
    load_count,
    rereads_per_token,
    speculative_hit_rate,
)
from bmoe_lab.metrics.cells import (
    cell_history,
    cell_slots,
)
from bmoe_lab.metrics.coalescing import (
    consecutive_id_rate,
    merged_reads,
)
from bmoe_lab.metrics.coupling import (
    coactivation,
    coactivation_lift,
    layer_mutual_information,
    layer_transition,
)
from bmoe_lab.metrics.demand import (
    demand_bytes_per_token,
    expert_bank_bytes,
    read_bytes_per_token,
    slots_per_demand,
    token_cycle_bytes,
    used_bytes,
)
from bmoe_lab.metrics.domains import (
    specialisation,
)
from bmoe_lab.metrics.experts import (
    expert_pieces,
)
from bmoe_lab.metrics.load import (
    expert_load,
    experts_to_cover,
    experts_used,
    experts_used_once,
    load_balance,
    load_cv,
    load_max_violation,
    routing_counts,
    top_share,
)
from bmoe_lab.metrics.locality import (
    chance_overlap,
    consecutive_jaccard,
    consecutive_overlap,
    working_set,
)
from bmoe_lab.metrics.policy import (
    drop_rate,
    routing_agreement,
    substitution_rate,
    weight_discarded_frac,
)
from bmoe_lab.metrics.predictors import (
    predictor_precision,
    predictor_recall,
)
from bmoe_lab.metrics.reuse import (
    reuse_distance,
)
from bmoe_lab.metrics.roofline import (
    roofline,
)
from bmoe_lab.metrics.router import (
    router_entropy,
    router_saturation,
    top_weight_share,
)
from bmoe_lab.metrics.savings import (
    drop_savings,
    keep_savings,
)
from bmoe_lab.metrics.scores import (
    near_ties,
    router_margin,
    score_entropy,
)
from bmoe_lab.metrics.text import (
    decode_speed,
    perplexity,
)
from bmoe_lab.metrics.timing import (
    evictions_per_token,
    major_faults_per_token,
    read_bandwidth,
    resident_bytes,
    time_split,
)

__all__ = [
    "byte_hit_rate",
    "cell_history",
    "cell_slots",
    "chance_overlap",
    "coactivation",
    "coactivation_lift",
    "consecutive_id_rate",
    "consecutive_jaccard",
    "consecutive_overlap",
    "decode_speed",
    "demand_bytes_per_token",
    "drop_rate",
    "drop_savings",
    "evictions_per_token",
    "expert_bank_bytes",
    "expert_load",
    "expert_pieces",
    "experts_to_cover",
    "experts_used",
    "experts_used_once",
    "first_of_load",
    "hit_rate",
    "keep_savings",
    "layer_mutual_information",
    "layer_transition",
    "load_balance",
    "load_count",
    "load_cv",
    "load_max_violation",
    "major_faults_per_token",
    "merged_reads",
    "near_ties",
    "perplexity",
    "predictor_precision",
    "predictor_recall",
    "read_bandwidth",
    "read_bytes_per_token",
    "rereads_per_token",
    "resident_bytes",
    "reuse_distance",
    "roofline",
    "router_entropy",
    "router_margin",
    "router_saturation",
    "routing_agreement",
    "routing_counts",
    "score_entropy",
    "slots_per_demand",
    "specialisation",
    "speculative_hit_rate",
    "substitution_rate",
    "time_split",
    "token_cycle_bytes",
    "top_share",
    "top_weight_share",
    "used_bytes",
    "weight_discarded_frac",
    "working_set",
]
