"""Chooses how often to save. Standard library only."""

from checkpointing.interval.rates import GammaRate, coalesce
from checkpointing.interval.tuner import Binding, Choice, TunerInputs, choose
from checkpointing.interval.waste import Costs, optimum_s, waste

__all__ = [
    "Binding",
    "Choice",
    "Costs",
    "GammaRate",
    "TunerInputs",
    "choose",
    "coalesce",
    "optimum_s",
    "waste",
]
