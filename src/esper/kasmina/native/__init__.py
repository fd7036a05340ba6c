"""A CPU's own way to run small networks: a host as a list of instructions, carried out in one call of compiled C++.

source/       the kernels and the loop over instructions      compiled.py   compiles them once per machine
assembler.py  instructions and their working memory           rules.py      layers as instructions, there and back
                                                              seeds.py      what seeds and gates are made of
networks.py   hosts with their seeds as programs              machine.py    runs programs on the memory of many hosts
"""
