"""`listwise index`: build, change and check an index of photos."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.filesize import decimal
from rich.table import Column

from listwise.cli.command import command, make_app, take
from listwise.cli.output import (
    PICTURES,
    Output,
    check_output,
    first_five,
    require_index,
    stoppable,
)
from listwise.errors import InputError
from listwise.progress import aligned, count_of

if TYPE_CHECKING:
    from listwise import search
    from listwise.search.methods import TuningResult

app = make_app(
    "Build an index of photos, add photos to it or remove them.",
    """Examples:
  listwise index build shop photos
  listwise index add shop more-photos
  listwise index info shop
""",
)

# Facts of `Index.info` whose name does not explain them.
FACTS = {
    "bytes": "size on disk",
    "dim": "dimensions",
    "engine": "storage",
    "entries": "photos",
    "intent": "limits",
    "local": "local features",
    "max_side": "photo size",
    "method": "search method",
    "milliseconds": "latency (ms)",
    "model": "fingerprint",
    "recall": "recall@10",
    "whitened": "whitening",
}
CONFLICTS = {
    "changed": "changed later, the later mark counts",
    "people": "people disagree",
    "chain": "connected by marks",
    "labels": "contradicts labels",
}
DAMAGE = {
    "damaged": "damaged files, marks and entries",
    "changed": "entries whose photo has changed",
    "missing": "entries whose photo does not exist",
    "repaired": "repaired",
    "removed": "removed, add their photos again",
    "lost": "not repaired, their photos cannot be used: add them again, or remove the entries",
}
CHANGED_QUERIES = 20


def open_existing(index: str, model: Path | None = None, device: str = "auto") -> "search.Index":
    """Open an index; one that does not exist is refused before PyTorch is imported."""
    require_index(index)
    from listwise.search import open_index

    return open_index(index, model, device=device, create=False)


@command(
    app,
    "search.opening:open_index",
    "search.index:Index.add",
    "search.methods:search_intent",
    without=("uri", "create"),
)
def build(
    output: Output,
    index: str,
    photos: list[str],
    *,
    model: str | None = None,
    local: bool = False,
    workers: int | None = None,
    **options: Any,
) -> None:
    """Build an index of photos, or add to an existing one.

    Args:
        photos: photos to add: folders, .csv or .parquet tables, .txt lists, single photos, or
            descriptor files.
        model: model folder, run folder, or name of a timm backbone; by default a backbone chosen
            for this machine.
        local: store local features, so that re-ranking takes less time.

    Examples:
      listwise index build shop photos
      listwise index build shop photos --local
      listwise index build shop photos.csv --model runs/a/model --memory 2GB
      listwise index build shop described.parquet --root photos --model model
      listwise index build milvus://127.0.0.1:19530/shop photos --model resnet50

    Every column of a table other than path and box becomes an attribute. Run the same command
    again to resume after an interruption.
    """
    from listwise.search.methods import SearchIntent, search_intent

    wanted = search_intent(**take(options, "memory", "milliseconds", "recall"))

    from listwise.data import Images
    from listwise.search.filling import open_sources
    from listwise.search.opening import open_index_for
    from listwise.search.syncing import missing_entries

    sources = open_sources(photos)
    described = take(options, "max_side", "scales", "power", "device")
    with output.console.status("loading the model"):
        opened = open_index_for(index, sources, model, **described, on_note=output.note)
    with opened:
        known = len(opened)
        if known:
            output.note(f"adding to an index of {count_of(known, 'photo')}: {index}")
            if wanted == SearchIntent():
                wanted = opened.store.method.state.intent
        with stoppable():
            added = opened.add(sources, local=local, workers=workers, **options)
            if local:
                opened.add_local_features(workers=workers)  # of entries that were there before
            if added.errors and not len(opened):
                raise InputError(f"none of the photos can be read; the first: {added.errors[0]}")
            for folder in (source.folder for source in sources if isinstance(source, Images)):
                gone = len(missing_entries(opened.store, folder)) if folder and known else 0
                if gone:
                    there = f"{count_of(gone, 'photo')} of the index no longer in {folder}"
                    remove = f"listwise index sync {shlex.quote(index)} --prune"
                    output.note(f"{there}: remove them with {remove}")
            with output.console.status("choosing a search method"):
                tuned = opened.tune(wanted, output.note)
        _print_added(output, opened, added, tuned)


@command(app, "search.index:Index.add", without=("local",))
def add(
    output: Output,
    index: str,
    photos: list[str],
    *,
    model: Path | None = None,
    device: str = "auto",
    **options: Any,
) -> None:
    """Add new and changed photos to an index; unchanged photos are skipped.

    Args:
        photos: photos to add: folders, .csv or .parquet tables, .txt lists, single photos, or
            descriptor files.
        model: model folder or ONNX file, if the model has moved.

    Examples:
      listwise index add shop more-photos
      listwise index add shop a.jpg b.jpg
    """
    with open_existing(index, model, device) as opened, stoppable():
        _print_added(output, opened, opened.add(photos, **options))


def _print_added(
    output: Output,
    index: "search.Index",
    added: "search.Added",
    tuned: "TuningResult | None" = None,
) -> None:
    """Print what was added, and the search method if one was chosen."""
    counts = {name: len(ids) for name, ids in vars(added).items() if name != "errors"}
    facts = {"index": index.uri, "entries": len(index), **counts, "errors": added.errors}
    output.answer(facts if tuned is None else {**facts, "search": tuned})
    output.unreadable(added.errors)
    if added.copies:
        copies = count_of(len(added.copies), "photo")
        shown = first_five([f"{path} is the same as {name}" for path, name in added.copies])
        output.say(f"skipped {copies} with the content of another one: {shown}", "yellow")
    kinds = ("added", "replaced", "moved", "updated", "unchanged")
    done = ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind])
    held = count_of(len(index), "photo")
    output.say(f"{done or 'nothing to add'}; {held} in {index.uri}", "bold")
    if tuned is not None:
        place = shlex.quote(index.uri)
        output.say(_search_text(tuned))
        output.say(f"next steps:\n  listwise search {place} PHOTO\n  listwise serve {place}")
    elif done:
        output.next_step("search", index.uri, "PHOTO")


def _search_text(tuned: "TuningResult") -> str:
    """Describe the search method of an index and what was measured."""
    return (
        f"search: {tuned.method}; recall@10 {tuned.recall:.3f}, {tuned.milliseconds:.1f} ms per "
        f"query, {decimal(tuned.memory)} of memory"
    )


@command(app, "search.index:Index.sync", without=("only",))
def sync(
    output: Output,
    index: str,
    folders: list[str] | None = None,
    *,
    prune: bool = False,
    dry_run: bool = False,
    watch: bool = False,
    **options: Any,
) -> None:
    """Bring an index up to date with folders: add, describe again, move and remove photos.

    Args:
        folders: folders of photos; by default those that were added to the index.
        prune: remove the entries whose photo is no longer in its folder.
        dry_run: change nothing, and show what would be done.
        watch: continue, and follow changes of the folders until Ctrl-C.

    Examples:
      listwise index sync shop --dry-run
      listwise index sync shop --prune
      listwise index sync shop photos --prune --watch
    """
    if watch and dry_run:
        raise InputError("--dry-run does not work with --watch: leave one of them out")
    with open_existing(index) as opened, stoppable():
        from listwise.search.syncing import followed_folders, watch_folders

        given = followed_folders(opened.store, folders)
        for changed in watch_folders(given) if watch else [None]:
            how = {"prune": prune, "dry_run": dry_run, "only": changed, **options}
            done = opened.sync(given, **how)
            if changed is None or done.changed:
                _print_synced(output, opened, done, prune, dry_run)


def _print_synced(
    output: Output, index: "search.Index", done: "search.Synced", prune: bool, dry_run: bool
) -> None:
    """Print what happened to the photos of folders."""
    if output.json:
        output.print_json({"index": index.uri, "entries": len(index), **vars(done)})
        return
    if done.errors:
        output.say(f"not synchronized: {first_five(done.errors)}", "yellow")
    kinds = {"added": "added", "replaced": "changed", "moved": "moved", "removed": "removed"}
    counts = [f"{len(getattr(done, kind))} {name}" for kind, name in kinds.items()]
    lead = "nothing was changed; a sync would have: " if dry_run else ""
    output.say(f"{lead}{', '.join(counts)}; {count_of(len(index), 'photo')} in {index.uri}", "bold")
    for kind in kinds if dry_run else ():
        names = [each if isinstance(each, str) else each[1] for each in getattr(done, kind)]
        if names:
            output.say(f"{kinds[kind]}: {first_five(names)}")
    if done.missing:
        gone = f"{count_of(len(done.missing), 'photo')} no longer in the folder"
        advice = "" if prune else "; --prune removes them"
        output.say(f"{gone}: {first_five(done.missing)}{advice}", "yellow")


@command(app, "search.index:Index.entries", name="list")
def list_entries(output: Output, index: str, **options: Any) -> None:
    """List the entries of an index with their attributes.

    Examples:
      listwise index list shop
      listwise index list shop --where "price < 100 and color = 'red'"
      listwise index list shop --start 1000 --count 50 --json
    """
    with open_existing(index) as opened:
        found = list(opened.entries(**options))
    from listwise.search.views import EntryView

    output.answer({"index": index, "entries": [EntryView.of(entry) for entry in found]})
    names = sorted({name for entry in found for name in entry.attributes})
    rows = [
        (*_id_and_size(entry), *(entry.attributes.get(name, "") for name in names))
        for entry in found
    ]
    output.table(("photo", "size", *(Column(name, no_wrap=True) for name in names)), rows)


def _id_and_size(entry: "search.Entry") -> tuple[str, str]:
    return entry.id, f"{entry.width}×{entry.height}"


@command(app, "search.index:Index.remove")
def remove(output: Output, index: str, photos: list[str] | None = None, **options: Any) -> None:
    """Remove entries from an index; the photo files are not deleted.

    Args:
        photos: ids of entries, or photos, folders, tables or lists.

    Examples:
      listwise index remove shop chairs/a.jpg
      listwise index remove shop more-photos
      listwise index remove shop --where "sold = true"
    """
    with open_existing(index) as opened:
        count = opened.remove(photos, **options)
        left = len(opened)
    done = f"removed {count_of(count, 'photo')} from {index}; {count_of(left, 'photo')} left"
    output.result({"removed": count, "entries": left}, done)


@command(app, "search.index:Index.duplicates")
def duplicates(
    output: Output,
    index: str,
    *,
    sheet: Path | None = None,
    remove: bool = False,
    yes: bool = False,
    **options: Any,
) -> None:
    """Find photos that are in an index more than once: files with the same content, and copies.

    Args:
        sheet: write a picture of the groups to this file (.png).
        remove: keep the best photo of each group in the index; the files are not deleted.
        yes: remove without asking.

    Examples:
      listwise index duplicates shop
      listwise index duplicates shop --sheet duplicates.png
      listwise index duplicates shop --mirrored --threshold 0.95 --json
      listwise index duplicates shop --remove  # keep the best of each group
    """
    check_output(sheet, *PICTURES)
    if remove and output.json and not yes:
        raise InputError("--json cannot ask before --remove removes photos: add --yes")
    with open_existing(index) as opened, stoppable():
        groups = opened.duplicates(**options)
        if sheet is not None and groups:
            from listwise.search.views import draw_duplicates

            draw_duplicates(groups).save(sheet)
        if not output.json:
            _print_duplicates(output, groups)
            if sheet is not None and groups:
                output.say(f"wrote a picture of the groups to {sheet}")
        total = sum(group.files - 1 for group in groups)
        question = f"remove {count_of(total, 'photo')} from the index? The files are not deleted"
        removed = 0
        if remove and total and (yes or typer.confirm(question)):
            copies = [path for group in groups for path in group.entries[0].copies]
            others = [entry for group in groups for entry in group.entries[1:]]
            removed = opened.remove([*others, *copies])
    if output.json:
        from listwise.search.views import DuplicateView

        views = [DuplicateView.of(group) for group in groups]
        output.print_json({"index": index, "groups": views, "removed": removed})
    elif removed:
        output.say(f"removed {count_of(removed, 'photo')} from {index}")


def _print_duplicates(output: Output, groups: "list[search.DuplicateGroup]") -> None:
    if not groups:
        output.say("no duplicates found")
        return
    rows = []
    for number, group in enumerate(groups, 1):
        first = (str(number), "exact" if group.exact else "near", f"{group.score:.3f}")
        note = f"keep: {group.reason}"
        for entry in group.entries:
            rows.append((*first, *_id_and_size(entry), note))
            first, note = ("", "", ""), ""
            rows += [(*first, name, "", "same content") for name in entry.copy_names]
    output.table(("group", "kind", "score", "photo", "size", ""), rows)
    total = sum(group.files - 1 for group in groups)
    found = count_of(len(groups), "group")
    output.say(f"{found}; {count_of(total, 'photo')} could be removed", "bold")


@command(app, "search.index:Index.upgrade")
def upgrade(
    output: Output, index: str, *, model: str, device: str = "auto", **options: Any
) -> None:
    """Describe the photos of an index with another model, and switch to it when all are done.

    Args:
        model: new model: model folder, run folder, or name of a timm backbone.

    Examples:
      listwise index upgrade shop --model runs/better/model
      listwise index upgrade shop --model runs/better/model --skip-missing
      listwise index upgrade milvus://127.0.0.1:19530/shop --model resnet101

    Searches use the earlier model until all photos are described; then the index and its running
    servers switch to the new one. Run the same command again to resume after an interruption. The
    earlier descriptors stay on the disk for listwise index rollback, until the next upgrade or
    listwise index discard.
    """
    with open_existing(index, device=device) as opened, stoppable():
        done = opened.upgrade(model, on_note=output.note, **options)
        _print_upgrade(output, opened, done)


@command(app, "search.index:Index.changes")
def changes(
    output: Output, index: str, *, queries: int = 100, k: int = 10, report: Path | None = None
) -> None:
    """Show the queries whose results changed most with the last upgrade of an index.

    Examples:
      listwise index changes shop
      listwise index changes shop --queries 500 --report changes.html
      listwise index changes shop --json

    The queries are entries of the index. Their results with the current model are compared with
    those of the model before the last upgrade.
    """
    check_output(report)
    with open_existing(index) as opened, output.console.status("searching"):
        found = opened.changes(queries, k=k)
    if report is not None:
        from listwise.results.changes import write_changes

        write_changes(report, f"Changes of {index}", found)
    changed = [
        {
            "id": change.query.id,
            "kept": change.kept,
            "before": _scores(change.before),
            "after": _scores(change.after),
        }
        for change in found.queries
    ]
    facts = {"k": found.k, "kept": found.kept, "same_first": found.same_first}
    output.answer({"index": index, **facts, "queries": changed})
    rows = []
    for change in found.queries[:CHANGED_QUERIES]:
        firsts = (hits[0].id if hits else "" for hits in (change.before, change.after))
        rows.append((f"{change.kept} of {len(change.before)}", change.query.id, *firsts))
    output.table(("kept", "query", "first before", "first after"), rows)
    output.say(
        f"{len(found.queries)} queries: {100 * found.kept:.1f} % of the first {found.k} results "
        f"are the same; {100 * found.same_first:.1f} % of the queries have the same first result",
        "bold",
    )
    if report is not None:
        output.say(f"wrote the report to {report}")


def _scores(hits: "Sequence[search.Hit]") -> list[dict[str, Any]]:
    return [{"id": hit.id, "score": hit.score} for hit in hits]


@command(app, "search.index:Index.rollback")
def rollback(
    output: Output, index: str, *, model: Path | None = None, device: str = "auto", **options: Any
) -> None:
    """Return to the model and the descriptors from before the last upgrade of an index.

    Examples:
      listwise index rollback shop
      listwise index rollback shop --json

    Photos that were added since the upgrade are described with the earlier model first. Run the
    command again to return to the new model.
    """
    with open_existing(index, device=device) as opened, stoppable():
        done = opened.rollback(model, on_note=output.note, **options)
        _print_upgrade(output, opened, done)


def _print_upgrade(output: Output, index: "search.Index", done: "search.UpgradeResult") -> None:
    header = index.header
    model = header.model_folder or header.model_name or header.model[:12]
    if done.skipped and not output.json:
        left_out = f"left out {count_of(len(done.skipped), 'photo')}"
        output.say(f"{left_out}: {first_five(done.skipped)}", "yellow")
    counted = f"{count_of(done.entries, 'photo')}, {count_of(done.described, 'photo')} described"
    text = f"{index.uri} uses the model {model} now: {counted}"
    facts = {"index": index.uri, "model": model, **vars(done)}
    output.result(facts, text, "index", "changes", index.uri)


@command(app)
def discard(output: Output, index: str) -> None:
    """Delete the descriptors that an upgrade replaced, and those of an unfinished upgrade.

    Examples:
      listwise index discard shop

    Servers switch to an upgraded index within seconds, or as soon as they have loaded it. Discard
    the earlier descriptors after that.
    """
    with open_existing(index) as opened:
        opened.discard_earlier()
        facts = {"index": index, "generations": opened.info()["generations"]}
    done = f"{index} has only its current descriptors now; a rollback is not possible any more"
    output.result(facts, done)


@command(app)
def marks(
    output: Output,
    index: str,
    *,
    conflicts: bool = False,
    export: Path | None = None,
    undo: list[str] | None = None,
) -> None:
    """List the marks of an index, export them as labels, or undo them.

    Args:
        conflicts: show only marks that contradict each other.
        export: write the classes of marked and labelled photos to this table (.csv).
        undo: undo the mark with this id; repeat for several.

    Examples:
      listwise index marks shop
      listwise index marks shop --conflicts
      listwise index marks shop --export labels.csv
      listwise index marks shop --undo 5f0c2a6e9b1d4c38

    Marks are stored with listwise search --save, on the search page, or in Python. The exported
    table is for listwise train.
    """
    with open_existing(index) as opened:
        undone = opened.marks.undo(undo) if undo else 0
        found = opened.marks.read()
    table = found.write(export) if export is not None else None
    conflicting = [
        {**vars(each), "marks": [mark.id for mark in each.marks]} for each in found.conflicts
    ]
    facts = {"marks": list(found), "conflicts": conflicting, "missing": found.missing}
    output.answer({"index": index, **facts, "undone": found.undone, "exported": table})
    if undo:
        output.say(f"undid {count_of(undone, 'mark')}")
    elif export is None and conflicts:
        for conflict in found.conflicts:
            output.say(CONFLICTS[conflict.kind], "bold")
            _print_marks(output, conflict.marks)
    elif export is None:
        _print_marks(output, found.active)
    if table is not None:
        left_out = (
            f"left out {count_of(table.conflicting, 'photo')} in conflict and "
            f"{count_of(table.missing, 'mark')}"
        )
        held = f"{count_of(table.photos, 'photo')} of {count_of(table.classes, 'class', 'classes')}"
        output.say(f"wrote {held} to {export}", "bold")
        output.say(f"{left_out} of photos that are not in the index")
        output.next_step("train", export)
    missing = f", {len(found.missing)} of photos that are not in the index" if found.missing else ""
    counted = f"{count_of(len(found), 'mark')}, {found.undone} undone{missing}"
    output.say(f"{counted}; {count_of(len(found.conflicts), 'conflict')}", "bold")


def _print_marks(output: Output, marks: "tuple[search.Mark, ...]") -> None:
    rows = [
        (
            *(mark.id, mark.query.id, "same" if mark.same else "different"),
            *(mark.entry, mark.by, mark.time[:16].replace("T", " ")),
        )
        for mark in marks
    ]
    output.table(("id", "query", "mark", "entry", "by", "time"), rows)


@command(app, "search.index:Index.add_local_features")
def local(output: Output, index: str, **options: Any) -> None:
    """Store local features of the photos of an index, so that re-ranking takes less time.

    Examples:
      listwise index local shop
      listwise index local shop --json

    Run the same command again to resume after an interruption. Photos that are added later get
    local features too.
    """
    with open_existing(index) as opened, stoppable():
        found = opened.add_local_features(**options)
        facts, total = opened.info()["local"], count_of(len(opened), "photo")
    output.unreadable(found.errors)
    counts = {"updated": len(found.updated), "errors": found.errors, "local": facts}
    done = f"stored local features of {count_of(len(found.updated), 'photo')}"
    has = f"{facts['entries']} of {total} have them, {decimal(facts['bytes'])}"
    then = ("search", index, "PHOTO", "--rerank")
    output.result({"index": index, **counts}, f"{done}; {has}", *then)


@command(app, "search.methods:search_intent")
def limits(output: Output, index: str, **options: Any) -> None:
    """Choose the search method of an index for limits of memory and time, and measure it.

    Examples:
      listwise index limits shop --recall 0.99
      listwise index limits shop --memory 2GB --milliseconds 20
      listwise index limits shop      # choose by the size of the index
    """
    with open_existing(index) as opened, output.console.status("measuring search methods"):
        from listwise.search.methods import search_intent

        tuned = opened.tune(search_intent(**options), output.note)
    output.result(tuned, _search_text(tuned))


@command(app)
def info(output: Output, index: str) -> None:
    """Show the contents, the model and the search method of an index.

    Examples:
      listwise index info shop
      listwise index info shop --json
    """
    require_index(index)
    from listwise.search.engines import open_store  # without PyTorch, which takes seconds to import

    with open_store(index) as store:
        facts = store.info()
    output.answer(facts)
    shown = [
        (_label(name), _fact_text(name, value))
        for name, value in {**facts.pop("settings"), **facts}.items()
        if value is not None or name == "max_side"
    ]
    for line in aligned(shown, left=2):
        output.say(line)


def _fact_text(name: str, value: Any) -> str:
    """Format a value of `Index.info` for people."""
    match value:
        case dict():
            given = {key: each for key, each in value.items() if each is not None}
            return (
                ", ".join(f"{_label(key)} {_fact_text(key, given[key])}" for key in given) or "none"
            )
        case list():
            return ", ".join(f"{each:g}" for each in value)
        case bool():
            return "yes" if value else "no"
        case int() if name in ("bytes", "memory"):
            return decimal(value)
        case float():
            return f"{value:.3g}"
    if name == "max_side":
        return f"long side of {value} pixels at most" if value else "original size"
    return "folder" if value == "embedded" else str(value)


def _label(name: str) -> str:
    return FACTS.get(name, name.replace("_", " "))


@command(app, "search.opening:check_index", without=("uri",))
def check(
    output: Output, index: str, *, repair: bool = False, model: Path | None = None, **options: Any
) -> None:
    """Check an index for damage; --repair repairs it.

    Args:
        repair: restore damaged files, and encode the photos of damaged entries again.
        model: model folder or ONNX file, if the model has moved.

    Examples:
      listwise index check shop
      listwise index check shop --repair
      listwise index check shop --photos --json

    The exit code is 1 if something is damaged and was not repaired.
    """
    require_index(index)
    from listwise.search import check_index

    with stoppable():
        result = check_index(index, model, repair=repair, **options)
    if output.json:
        output.print_json({**vars(result), "ok": result.ok})
    else:
        _print_check(output, index, result, repair)
    if not result.ok:
        raise typer.Exit(1)


def _print_check(output: Output, index: str, result: "search.CheckResult", repair: bool) -> None:
    """Print what a check of an index found, and what to do next."""
    for name, what in DAMAGE.items():
        found = getattr(result, name)
        if found:
            output.say(f"{len(found)} {what}: {first_five(found)}", "yellow")
    place = shlex.quote(index)
    read = f"{count_of(result.entries, 'photo')} checked in {index}"
    if result.ok:
        done = "everything is repaired" if result.damaged else "no damage found"
        output.say(f"{read}: {done}", "bold")
    elif repair:
        output.say(f"{read}: not everything could be repaired", "bold red")
    else:
        output.say(f"{index} is damaged; run listwise index check {place} --repair", "bold red")
