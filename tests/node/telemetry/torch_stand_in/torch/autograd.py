enabled = False


def _profiler_enabled():
    return enabled
