"""A CPU's own way to run small networks: a host as a list of instructions, carried out in one call of compiled C++.

compiled.py   the kernels of esper/cpp/native                 trial.py      rules beside PyTorch, before they are used
assembler.py  instructions and their working memory           rules.py      layers as instructions, there and back
                                                              seeds.py      what seeds and gates are made of
networks.py   hosts with their seeds as programs              machine.py    runs programs on the memory of many hosts
"""
