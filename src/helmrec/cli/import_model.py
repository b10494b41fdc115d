"""`helmrec import`: convert models of others to model folders."""

from pathlib import Path
from typing import Annotated, Any

import typer

from helmrec.cli.console import bytes_bar, exit_on_error, out

import_app = typer.Typer(help="Import published models and models of your own.", no_args_is_help=True)


@import_app.callback()
def _import() -> None:
    """Import published models and models of your own."""


@import_app.command("dlrmv3")
def dlrmv3(  # noqa: PLR0913, PLR0917 - one parameter per flag
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="non_sparse.ckpt, or its folder.")],
    tables: Annotated[Path, typer.Option(help="The folder of sharded tables, with its .metadata.")],
    folder: Annotated[Path, typer.Option("--out", help="Model folder to create; must be new or empty.")],
    heads: Annotated[int, typer.Option(help="Attention heads; a checkpoint does not contain them.")] = 4,
    window: Annotated[int, typer.Option(help="Most events of a history that the model uses.")] = 16_384 - 2_048 - 1,
    candidates: Annotated[int, typer.Option(help="Most candidates of a request.")] = 2_048,
    item: Annotated[str, typer.Option(help="Table of the items, as the checkpoint names it.")] = "item_id",
    extra: Annotated[
        list[str] | None,
        typer.Option(
            help="Table of a further feature of events; in order, '' for none.", show_default="item_category_id"
        ),
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(
            help="Table of a contextual feature; in order, '' for none. NAME:20: zeros below 20 events and candidates.",
            show_default="user_id:20",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of dense weights and K/V: float32 or bfloat16; the checkpoint's own by default.")
    ] = None,
) -> None:
    """Import Meta's DLRMv3 or another model of its production form, without running pickled code of its files."""
    from helmrec.model.dlrmv3 import ImportOptions, import_dlrmv3

    with exit_on_error(), bytes_bar() as bar:
        asked: dict[str, Any] = {"num_heads": heads, "window": window, "max_candidates": candidates, "dtype": dtype}
        asked |= {"item": item} | ({} if extra is None else {"extra": tuple(filter(None, extra))})
        asked |= {} if context is None else {"context": tuple(filter(None, context)), "min_context_events": 0}
        task = bar.add_task("writing and hashing", total=None)
        config = import_dlrmv3(checkpoint, tables, folder, ImportOptions(**asked), lambda done: bar.advance(task, done))
    out.print(f"{folder}: {config.num_layers} layers, {config.num_rows:,} rows in {len(config.tables)} tables")
    out.print("its K/V depend on the query: they are reused within a request only", highlight=False)


@import_app.command("research")
def research(  # noqa: PLR0913, PLR0917 - one parameter per flag
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint of the research trainer.")],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Model folder to create; must be new or empty.")],
    heads: Annotated[int, typer.Option(help="Attention heads (num_heads); a checkpoint does not contain them.")],
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key of the weights in the file; '' if it holds them alone.", show_default="model_state_dict"
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Most events that the model uses.", show_default="positions of the checkpoint less 11"),
    ] = None,
    candidates: Annotated[int, typer.Option(help="Most candidates of a request.")] = 1_000,
    item_l2_norm: Annotated[bool, typer.Option(help="Whether items are brought to length 1 (item_l2_norm).")] = True,
    temperature: Annotated[float, typer.Option(help="Divides scores; evaluation of the original has none.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="Of dense weights and K/V: float32 or bfloat16.")] = "float32",
) -> None:
    """Import the research HSTU of Meta's generative-recommenders, without running pickled code of its file."""
    from helmrec.model.meta_research import ResearchOptions, import_research

    with exit_on_error(), bytes_bar() as bar:
        asked: dict[str, Any] = {"num_heads": heads, "window": window, "max_candidates": candidates, "dtype": dtype}
        asked |= {"item_l2_norm": item_l2_norm, "temperature": temperature}
        asked |= {} if key is None else {"keys": tuple(filter(None, key))}
        task = bar.add_task("writing and hashing", total=None)
        config = import_research(checkpoint, folder, ResearchOptions(**asked), lambda done: bar.advance(task, done))
    out.print(f"{folder}: {config.num_layers} layers, {config.num_rows:,} items, window {config.window}")
    out.print("its last event is computed for every request: K/V of all events before it are reused", highlight=False)


@import_app.command("nvidia")
def nvidia(  # noqa: PLR0913, PLR0917 - one parameter per flag
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Dense weights: torch_module/model.0.pth.")],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Model folder to create; must be new or empty.")],
    tables: Annotated[Path, typer.Option(help="Folder of the tables: dynamicemb_module.")],
    heads: Annotated[int, typer.Option(help="Attention heads (num_attention_heads).")],
    scaling_seqlen: Annotated[int, typer.Option(help="What attention is divided by (scaling_seqlen).")],
    item: Annotated[str, typer.Option(help="Table of the items.")] = "item",
    action: Annotated[
        str | None, typer.Option(help="Table of the actions, if they are tokens.", show_default="none")
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(help="Table of a contextual feature; in order. Needs --causal-context.", show_default="none"),
    ] = None,
    causal_context: Annotated[bool, typer.Option(help="Trained with disable_contextual_mask.")] = False,
    window: Annotated[
        int | None, typer.Option(help="Most tokens of items and actions.", show_default="positions of the checkpoint")
    ] = None,
    candidates: Annotated[int, typer.Option(help="Most candidates of a request.")] = 1_000,
    activation: Annotated[str, typer.Option(help="Of the head: relu or gelu (prediction_head_act_type).")] = "relu",
    epsilon: Annotated[float, typer.Option(help="Of the layers' norms (norm_epsilon).")] = 1e-5,
    dtype: Annotated[str, typer.Option(help="Of dense weights and K/V: float32 or bfloat16.")] = "float32",
) -> None:
    """Import a ranking model of NVIDIA's recsys-examples, without running pickled code of its file."""
    from helmrec.model.nvidia import NvidiaOptions, import_nvidia

    with exit_on_error(), bytes_bar() as bar:
        asked: dict[str, Any] = {"num_heads": heads, "scaling_seqlen": scaling_seqlen, "item": item, "action": action}
        asked |= {"context": tuple(context or ()), "is_context_causal": causal_context, "window": window}
        asked |= {"max_candidates": candidates, "activation": activation, "norm_epsilon": epsilon, "dtype": dtype}
        task = bar.add_task("writing and hashing", total=None)
        options = NvidiaOptions(**asked)
        config = import_nvidia(checkpoint, tables, folder, options, lambda done: bar.advance(task, done))
    out.print(f"{folder}: {config.num_layers} layers, {config.num_rows:,} rows in {len(config.tables)} tables")


@import_app.command("hstu")
def hstu(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A file of torch.save or safetensors, or a folder of the latter."),
    ],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Model folder to create; must be new or empty.")],
    map_file: Annotated[Path, typer.Option("--map", help="TOML file: the model, and the source of every weight.")],
) -> None:
    """Import an HSTU of your own, whose weights have other names and layouts, as a map describes."""
    from helmrec.model.weight_map import import_mapped

    with exit_on_error(), bytes_bar() as bar:
        task = bar.add_task("writing and hashing", total=None)
        config = import_mapped(checkpoint, folder, map_file, lambda done: bar.advance(task, done))
    out.print(f"{folder}: {config.num_layers} layers, {config.num_rows:,} rows in {len(config.tables)} tables")
    out.print(f"compare its scores with your model's, then: helmrec model check {folder}", highlight=False)


@import_app.command("names")
def names(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A file of torch.save or safetensors.")],
    key: Annotated[
        list[str] | None,
        typer.Option(help="Key under which the weights are saved; of nested ones in order.", show_default="none"),
    ] = None,
) -> None:
    """List the weights of a checkpoint, to write a map for `helmrec import hstu`."""
    from helmrec.model.checkpoint import read_checkpoint

    with exit_on_error():
        weights = read_checkpoint(checkpoint, key or ())
    for name, value in weights.items():
        kind = str(value.dtype).removeprefix("torch.")
        out.print(f"{name} {tuple(value.shape)} {kind}", highlight=False, markup=False, soft_wrap=True)
