"""The numbers that the rules go by, fixed for a run and written into its journal."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits for `decide`; derived from the run's TOML by `orchestrator.config`.

    Attributes:
        launch_timeout_s: Longest wait for enough agents before the run fails for want of capacity.
        start_timeout_s: Longest time from the order to start ranks until all agents confirm it.
        kill_grace_s: Time between SIGTERM and SIGKILL when ranks are stopped.
        stop_save_s: Time that a planned stop gives the ranks to save and leave by themselves.
        final_upload_s: Longest wait for the last checkpoint's upload after the ranks are done.
        budget: Unforgiven incidents allowed per fault class inside `budget_window_s`.
        budget_window_s: The sliding window of `budget`.
        same_root_limit: Incidents in a row with one root and no new step before the run stops.
        node_strikes: Incidents blamed on one node inside the window before it is excluded.
        exclude_s: For how long a node is excluded that the run excluded by itself.
        exclusion_limit: Nodes that runs may exclude by themselves inside `budget_window_s`;
            beyond it a person must look, and no further node is excluded.
        min_nodes: Fewest nodes that an attempt may have; fewer than the run's count means that
            the run shrinks when no spare is left, and grows again when nodes come.
        replace_nodes: Whether further allocations are asked for in place of nodes that are gone.
        tune_interval: Whether measured costs may move the checkpoint interval.
        max_lost_work_s: Most work, in seconds, that one fault may cost (RPO).
        max_overhead: Largest share of time that saving may take, 0..1.
        prior_per_1000_node_days: Expected faults before any were seen.
        memory_interval_steps: Saves in memory are made at least this often; 0: with the store's.
        peers: Whether nodes keep copies of each other's memory.
        fetch_timeout_s: Longest time for bringing such copies back before ranks start.
        watches: Whether each node keeps the folders that the job writes by itself.
    """

    launch_timeout_s: float = 120.0
    start_timeout_s: float = 60.0
    kill_grace_s: float = 5.0
    stop_save_s: float = 60.0
    final_upload_s: float = 300.0
    budget: dict[str, int]
    budget_window_s: float = 86_400.0
    same_root_limit: int = 3
    node_strikes: int = 2
    exclude_s: float = 86_400.0
    exclusion_limit: int = 5
    min_nodes: int = 0
    replace_nodes: bool = False
    tune_interval: bool = True
    max_lost_work_s: float = 1_800.0
    max_overhead: float = 0.02
    prior_per_1000_node_days: float = 24.0
    memory_interval_steps: int = 0
    peers: bool = False
    fetch_timeout_s: float = 600.0
    watches: bool = False
