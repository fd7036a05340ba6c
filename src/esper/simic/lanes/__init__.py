"""Functions of hosts, recorded once from PyTorch and carried out by compiled C++, 64 hosts at a time (CPU).

function --recorder, rules--> instructions on registers --program--> words --library--> answers
"""
