"""Sets of weights in host memory, of which the device holds those in use."""

from .module import WeightBank
from .plan import BankPlan

__all__ = ["BankPlan", "WeightBank"]
