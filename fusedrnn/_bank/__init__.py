"""Sets of weights in host memory, of which the device holds those in use."""

from .bank_plan import BankPlan
from .weight_bank import WeightBank

__all__ = ["BankPlan", "WeightBank"]
