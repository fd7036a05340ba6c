"""Our C++: the sources, how they are compiled and where libraries are cached (`build.py`)."""
