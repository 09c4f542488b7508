import json
from pathlib import Path


class profile:  # noqa: N801 - torch's name
    def start(self):
        pass

    stop = start

    def export_chrome_trace(self, path):
        events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5}]
        Path(path).write_text(json.dumps({"traceEvents": events}))
