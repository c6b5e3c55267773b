"""Makes batches of rollouts: a manifest in, one folder for each rollout out, resumable after any interruption.

manifest --ClaimedJobs--> claimed --load--> ready --at_once sessions--> made --decode, write--> OUTPUT/rollouts/ID
"""
