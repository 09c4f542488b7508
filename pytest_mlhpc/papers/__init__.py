"""Tables and logs as published benchmarks want them: MLPerf HPC, HPC AI500, HPDC'24, roofline."""
