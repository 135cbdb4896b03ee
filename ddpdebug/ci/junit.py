"""JUnit XML as the strictest of the schemas in use allows it. Torch-free; builds text, writes nothing.

Properties belong to the suite, a case has one failure, and every suite says when and how long it ran.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

#: The time of a document that nobody dated.
EPOCH = "1970-01-01T00:00:00"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def xml_text(text: str) -> str:
    """Return the text without the characters that XML does not allow."""
    return _NOT_XML.sub("?", text)


def new_case(name: str) -> ET.Element:
    """Return a test case that passed."""
    return ET.Element("testcase", classname="ddpdebug", name=xml_text(name), time="0")


def add_property(element: ET.Element, name: str, value: str) -> None:
    """Add a property to a suite's properties."""
    ET.SubElement(element, "property", name=name, value=xml_text(value))


def add_suite(
    root: ET.Element, name: str, time: str, properties: ET.Element, cases: Sequence[ET.Element], output: str
) -> None:
    """Add a suite with its cases; the counts are taken from them."""
    suite = ET.SubElement(root, "testsuite", id=str(len(root)), name=xml_text(name), package="ddpdebug")
    suite.attrib.update(hostname="localhost", timestamp=time, time="0", tests=str(len(cases)))
    for count, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(sum(case.find(kind) is not None for case in cases)))
    suite.extend((properties, *cases))
    ET.SubElement(suite, "system-out").text = xml_text(output)
    ET.SubElement(suite, "system-err")


def document(root: ET.Element) -> str:
    """Return the file's text."""
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
