"""Extensions from installed packages, found through entry points: commands, policies, routers and scenarios.

The product never imports these packages by name. Listing the names of extensions loads nothing.
"""

from importlib.metadata import EntryPoint, entry_points

COMMANDS = "helmrec.commands"  # a Typer app, or a function that Typer can turn into a command
POLICIES = "helmrec.policies"  # a function: the policy's name -> `sim.policies.SimulatedPolicy`
ROUTERS = "helmrec.routers"  # a function: the router's name, `RouterCost`, NumPy generator -> `router.policy.Policy`
SCENARIOS = "helmrec.scenarios"  # a package whose TOML files are scenarios


def extensions(group: str) -> dict[str, EntryPoint]:
    """The installed entry points of a group by name, in alphabetical order."""
    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda entry: entry.name)}
