"""Our C++: the sources, how they are compiled (`build.py`), and where libraries are cached (`cache.py`)."""
