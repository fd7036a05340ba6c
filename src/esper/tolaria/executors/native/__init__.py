"""A CPU's own way to run small networks: a host as a list of instructions, carried out in one call of compiled C++.

executor.py              trains and measures hosts         structures.py      which program each host runs
networks.py              hosts with their seeds as programs
layer_rules.py           layers as instructions            seed_rules.py      what seeds and gates are made of
trial.py                 rules compared with PyTorch, before they are used
optimizer_programs.py, optimizer_step.py                   the optimizer step
assembler.py             instructions and their working memory
machine.py, library.py   run programs with the compiled kernels of esper/cpp/native
"""
