"""A node imports only code that its owner listed, including methods of installed packages."""

import sys
from pathlib import Path

import pytest

from hetero_ssfl.config import load_config
from hetero_ssfl.errors import ProtocolError
from hetero_ssfl.federation.participants.node import check_instruction
from hetero_ssfl.federation.participants.node_settings import NodeSettings


def test_an_installed_method_is_imported_only_if_the_owner_listed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin-1.0.dist-info").mkdir()
    (tmp_path / "plugin-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    entry = "[hetero_ssfl.methods]\ninstalled = plugin_of_others:Quiet\n"
    (tmp_path / "plugin-1.0.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / "plugin_of_others.py").write_text("from hetero_ssfl.methods import Local\nclass Quiet(Local): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config("smoke", ["method=installed"])
    node = {"name": "clinic", "encoder": "resnet8"}
    with pytest.raises(ProtocolError, match=r"asked to import .installed., which is not listed in limits\.code"):
        check_instruction(NodeSettings.model_validate(node), config, 64)
    assert "plugin_of_others" not in sys.modules
    check_instruction(NodeSettings.model_validate({**node, "limits": {"code": ["installed"]}}), config, 64)
    assert sys.modules.pop("plugin_of_others")
