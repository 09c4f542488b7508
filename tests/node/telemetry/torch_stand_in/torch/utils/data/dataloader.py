import time


class _BaseDataLoaderIter:
    def __iter__(self):
        return self

    def __next__(self):
        time.sleep(0.02)
        return 1
