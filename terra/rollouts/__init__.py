"""Thousands of rollouts: a manifest in, one folder a rollout out, whatever happens in between.

manifest --ClaimedJobs--> claimed --load--> ready --at_once sessions--> made --decode, write--> OUTPUT/rollouts/ID
"""
