"""What a CI service needs beside pytest: child pipelines, OpenMetrics, comments of merge requests, proposals of baselines."""
