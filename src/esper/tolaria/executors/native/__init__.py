"""Small networks on a CPU: each host is a list of instructions, executed in one call of compiled C++ (`cpp/native`)."""
