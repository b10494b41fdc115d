"""What installed packages add: commands, policies, routers and scenarios, found through entry points.

The product never imports who adds them. Names are known without loading anything.
"""

from importlib.metadata import EntryPoint, entry_points

COMMANDS = "helmrec.commands"  # a Typer app, or a function that Typer can make a command of
POLICIES = "helmrec.policies"  # a function: the policy's name -> `sim.policies.SimulatedPolicy`
ROUTERS = "helmrec.routers"  # a function: the router's name, `RouterCost`, NumPy generator -> `router.policy.Policy`
SCENARIOS = "helmrec.scenarios"  # a package whose TOML files are scenarios


def extensions(group: str) -> dict[str, EntryPoint]:
    """What is installed in this group, by name, in alphabetical order."""
    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda entry: entry.name)}
