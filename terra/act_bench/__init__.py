"""ACT-Bench (Arai et al. 2024, arXiv 2412.05337): whether a generated video follows its instructed trajectory."""
