"""What each operator of PyTorch does to the numbers of one host, as instructions.

A rule is called with the recorder, the tensor that PyTorch answered (a list, if there are several), and the arguments
of the operator; it returns the codes of the answer. Views have no rule, because they only look at codes, and nor have
operators whose arguments are all constants.

    pointwise.py    one instruction for each number
    moving.py       numbers go to other places, known now or chosen by an index
    combining.py    sums, extremes, products of matrices
"""

from esper.simic.lanes import combining, moving, pointwise
from esper.simic.lanes.recorder import Rules

RULES: Rules = {**pointwise.RULES, **moving.RULES, **combining.RULES}
"""By name of the operator, without namespace, overload and the underscore of operators that write in place."""
