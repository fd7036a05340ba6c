"""Runs small networks on a CPU: each host is a list of instructions for the C++ kernels of esper/cpp/native.

executor.py                      trains and measures hosts
structures.py                    chooses and caches the program of each host, and sets the addresses of its memory
networks.py                      hosts with their seeds as programs
layer_rules.py, seed_rules.py    layers, seeds and gates as instructions
trial.py                         compares rules with PyTorch before they are used
optimizer_step.py                the optimizer step as a program
assembler.py                     instructions and working memory
machine.py, library.py           run programs
"""
