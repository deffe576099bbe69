"""The commands that use trained encoders: embed, export, neighbours."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from ..terminal import Console
from .options import SKIP, BadImage, Json, Quiet
from .terminal import remark, say, show

app = typer.Typer()

Model = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run, or of one model.")]
Client = Annotated[str | None, typer.Option(help="The client whose encoder is used: a number or a name.")]
Encoder = Annotated[str | None, typer.Option(metavar="MODULE:CALLABLE", help="Builds it, if its card names no code.")]


@app.command()
def embed(
    run: Model,
    images: Annotated[str, typer.Option(metavar="SOURCE", help="A folder, an image, parquet, or a data set's name.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="FILE.parquet or FILE.npy.")],
    client: Client = None,
    encoder: Encoder = None,
    on_bad_image: BadImage = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn images into feature vectors with a client's trained encoder.

    Parquet has the columns row, path and feature; read it with pandas.read_parquet, and stack the features with
    numpy.stack(table["feature"]). Images of any size are resized and cropped to what the encoder takes.

    Examples:
      hetero-ssfl embed runs/a --client 2 --images photos -o features.parquet
      hetero-ssfl embed state/federations/ID/model --images scans -o scans.npy
    """
    from ..data import skip_with
    from ..use.embed import check_output, open_images, save_features
    from ..use.embed import embed as embed_images
    from ..use.models import find_model

    check_output(output)
    model = find_model(run, client)
    total, pictures = open_images(model, images, on_bad_image or "error")
    with skip_with(SKIP):
        features = embed_images([model.load(encoder)], pictures, total, Console(stderr=True, quiet=quiet))
    save_features(output, features, model)
    count, width = features.features[0].shape
    bad = total - count
    content = {"file": str(output), "client": model.client, "images": count, "width": width, "skipped": bad}
    skipped = f", {bad} bad images skipped" if bad else ""
    show(as_json, content, f"{count:,} images, {width} features each{skipped}: {escape(str(output))}")


@app.command()
def export(
    run: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER|FILE", help="A folder, or a file.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="safetensors, torch-export or onnx.")] = "safetensors",
    client: Client = None,
    encoder: Encoder = None,
    as_json: Json = False,
) -> None:
    """Export a client's trained encoder for other programs, with a model card that explains how to load it.

    Files for torch.export and ONNX take images with values from 0 to 1 (n, channels, side, side), for any n, and load
    without this package. The exported model is compared with the encoder before it is written.

    Examples:
      hetero-ssfl export runs/a --client 2 --to onnx -o exported
      hetero-ssfl export runs/a --client 2 --to torch-export -o encoder.pt2
    """
    from ..use.export import export as export_model
    from ..use.models import find_model

    model = find_model(run, client)
    file = export_model(model, to, output, encoder)
    text = f"{model.client}, {escape(model.card['encoder'])}: {escape(str(file))}"
    show(as_json, {"file": str(file), "client": model.client, "format": to}, text)


@app.command()
def publish(
    run: Model,
    name: Annotated[str, typer.Argument(metavar="OWNER/MODEL", help="The repository.", show_default=False)],
    to: Annotated[Literal["hub"], typer.Option(help="The Hugging Face hub.")] = "hub",
    client: Client = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder to write; by default published/MODEL.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the folder, and upload nothing.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
    as_json: Json = False,
) -> None:
    """Publish a client's trained encoder on the Hugging Face hub, with a card and code to load it without this package.

    Log in first: `hf auth login`. Look at what is uploaded with --dry-run. A new repository is private.

    Examples:
      hetero-ssfl publish runs/a me/cells --client 2 --to hub --dry-run
    """
    from ..use.models import find_model
    from ..use.publish import upload, write_folder

    folder = write_folder(find_model(run, client), output or Path("published", name.rpartition("/")[2]))
    address = None if dry_run else upload(folder, name, public)
    show(as_json, {"folder": str(folder), "address": address}, f"folder: {escape(str(folder))}")
    if address:
        remark(f"published: {escape(address)}")


@app.command()
def neighbours(
    run: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.html", help="The page to write.")],
    client: Annotated[list[str] | None, typer.Option(help="A number or name; repeat. By default all.")] = None,
    query: Annotated[list[str] | None, typer.Option(metavar="IMAGE|ROW", help="An image or number; repeat.")] = None,
    images: Annotated[str | None, typer.Option(metavar="SOURCE", help="What to search; by default the RAD.")] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=200, help="The number of nearest images to show.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the four queries without --query.")] = 0,
    encoder: Encoder = None,
    on_bad_image: BadImage = None,
    quiet: Quiet = False,
) -> None:
    """Write a page of the images that the encoders consider most similar, to see what they learned.

    The page has one row per client, to show how their encoders differ. It is a single file that works offline.

    Examples:
      hetero-ssfl neighbours runs/a -o neighbours.html
      hetero-ssfl neighbours runs/a --client 2 --query 17 -k 12 -o page.html
      hetero-ssfl neighbours runs/a --client 0 --client 2 -o two.html
      hetero-ssfl neighbours runs/a --images photos --query cat.png -o cats.html
    """
    from ..data import skip_with
    from ..use.models import find_models
    from ..use.neighbours import Search, write_neighbours

    models = [model for one in client or ["all"] for model in find_models(run, one)]
    search = Search(models, images, query or [], k, seed, on_bad_image or "error", encoder)
    with skip_with(SKIP):
        write_neighbours(search, output, Console(stderr=True, quiet=quiet))
    say(f"page: {escape(str(output))}")
