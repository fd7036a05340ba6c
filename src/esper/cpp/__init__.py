"""C++ of our own: the sources, how they are compiled (`build.py`), and where libraries are kept (`cache.py`)."""
