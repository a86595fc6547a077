"""Makes of matplotlib's SVG one that is small, follows light and dark, and speaks to readers."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from llmserve.report.palette import DARK, LIGHT
from llmserve.report.paths import compact

_NAME = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_KEYS = {colour: key for key, colour in LIGHT.items()}
_COLOUR = re.compile(r"(fill|stroke): (#[0-9a-f]{6})")
_FONT = re.compile(r"font(?:-size)?: ([\d.]+)px[^;]*")
_LONG = re.compile(r"-?\d+\.\d{3,}")
_FACE = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"


def polish(raw: bytes, name: str, title: str, alt: str) -> str:
    """Rework a plot; ``name`` keeps its ids apart from those of others on the same page."""
    root = ET.fromstring(raw)  # noqa: S314 (what matplotlib has just written)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.startswith(f"{_NAME}metadata") or child.tag == f"{_NAME}style":
                parent.remove(child)
    named = _used_names(root)
    for node in root.iter():
        _restyle(node)
        _rename(node, name, named)
        if "d" in node.attrib:
            node.set("d", compact(node.attrib["d"]))
    _flatten(root)
    box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"viewBox": box, "role": "img", "aria-labelledby": f"{name}-t {name}-d"})
    root.set("class", "plot")
    root.set("style", _FACE)
    _describe(root, name, title, alt)
    ET.register_namespace("", _NAME.strip("{}"))
    ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return re.sub(r">\s+<", "><", ET.tostring(root, encoding="unicode")).strip()


def standalone(svg: str) -> str:
    """Make a file of a plot: with its own colours, and a ground, since nobody else brings one."""
    used = sorted(set(re.findall(r"\b([fs])-(\w+)", svg)) | {("f", "paper")})
    rules = {
        scheme: "".join(
            f".{what}-{key}{{{'fill' if what == 'f' else 'stroke'}:{colours[key]}}}"
            for what, key in used
            if key in colours
        )
        for scheme, colours in (("light", LIGHT), ("dark", DARK))
    }
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    style = f"<style>{rules['light']}@media(prefers-color-scheme:dark){{{rules['dark']}}}</style>"
    ground = f'<rect class="f-paper" width="{width}" height="{height}"/>'
    head, rest = svg.split("</desc>", 1)
    head = head.replace("<svg ", f'<svg width="{width}" height="{height}" ', 1)
    return f"{head}</desc>{style}{ground}{rest}\n"


def _restyle(node: ET.Element) -> None:
    style = node.attrib.pop("style", "")
    classes = []
    for what, colour in _COLOUR.findall(style):
        if key := _KEYS.get(colour):
            classes.append(f"{what[0]}-{key}")
            style = style.replace(f"{what}: {colour}", "")
    style = _FONT.sub(lambda found: f"font-size:{float(found[1]):g}px", style)
    rules = [rule.strip().replace(": ", ":") for rule in style.split(";") if rule.strip()]
    if rules:
        node.set("style", ";".join(rules))
    if classes:
        node.set("class", " ".join(classes))
    for key in ("x", "y", "transform"):
        if key in node.attrib:
            node.set(key, _LONG.sub(lambda found: f"{float(found[0]):.2f}", node.attrib[key]))


def _used_names(root: ET.Element) -> set[str]:
    text = " ".join(value for node in root.iter() for value in node.attrib.values())
    return set(re.findall(r"url\(#([\w-]+)\)", text)) | {
        node.attrib[_LINK][1:] for node in root.iter() if _LINK in node.attrib
    }


def _rename(node: ET.Element, name: str, used: set[str]) -> None:
    own = node.attrib.pop("id", None)
    if own in used:
        node.set("id", f"{name}-{own}")
    if _LINK in node.attrib:
        node.set(_LINK, f"#{name}-{node.attrib[_LINK][1:]}")
    if "clip-path" in node.attrib:
        node.set("clip-path", node.attrib["clip-path"].replace("(#", f"(#{name}-"))


def _flatten(node: ET.Element) -> None:
    """Take away groups that say nothing, of which matplotlib makes many."""
    children: list[ET.Element] = []
    for child in node:
        _flatten(child)
        plain = child.tag == f"{_NAME}g" and not child.attrib
        children += list(child) if plain else [child]
    for child in list(node):
        node.remove(child)
    node.extend(child for child in children if len(child) or child.attrib or child.text)


def _describe(root: ET.Element, name: str, title: str, alt: str) -> None:
    for at, (tag, text) in enumerate((("title", title), ("desc", alt))):
        node = ET.Element(f"{_NAME}{tag}", {"id": f"{name}-{tag[0]}"})
        node.text = text
        root.insert(at, node)
