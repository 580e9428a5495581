"""An orchestrator's loop: asks the model, runs its tool calls in a workspace, gives it the results, until it is done.

It may be killed at any moment. Started again on the same transcript it goes on where it was: it sends the calls that
have no result again, with the same tool call IDs, and the agent answers what has run from its records.

``python -m examples.agent_loop`` shows it: the loop is killed in the middle of a batch, and counts are taken.
"""
