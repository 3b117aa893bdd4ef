"""What `listwise serve` refuses; tests/serving has what it does."""

import socket

import pytest
import torch

from listwise.descriptors import Model
from listwise.models import RetrievalNet
from listwise.search.opening import create_store, header_of


def make_model(folder, seed):
    torch.manual_seed(seed)
    net = RetrievalNet("test_resnet.r160_in1k", weights="random")
    model = Model(net)
    model.save(folder)
    return model


@pytest.fixture
def index(tmp_path):
    model = make_model(tmp_path / "model", 0)
    create_store(tmp_path / "index", header_of(model)).close()
    return tmp_path / "index"


def test_there_must_be_an_index(listwise, tmp_path):
    code, out, err = listwise("serve", "nowhere", "--port", 0)
    assert (code, out) == (2, "")
    assert err.startswith("listwise: no index at nowhere: create one with")
    assert err.count("\n") == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "example.org", "::"])
def test_others_are_let_in_with_a_token_only(listwise, monkeypatch, host):
    monkeypatch.delenv("LISTWISE_TOKEN", raising=False)
    said = f"listwise: other machines can reach {host}: set a token with LISTWISE_TOKEN or --token"
    assert listwise("serve", "index", "--host", host) == (2, "", f"{said}\n")
    monkeypatch.setenv("LISTWISE_TOKEN", "")
    assert listwise("serve", "index", "--host", host) == (2, "", f"{said}\n")


def test_a_taken_port_is_named(listwise):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = listwise("serve", "index", "--port", port)
    assert code == 2
    assert err == (
        f"listwise: cannot listen on 127.0.0.1, port {port}: the port is in use: "
        "choose another with --port\n"
    )


def test_an_address_of_another_machine_is_refused(listwise):
    code, _, err = listwise("serve", "index", "--host", "192.0.2.1", "--token", "t")
    assert code == 2
    assert err.startswith("listwise: cannot listen on 192.0.2.1, port 8000: ")
    assert err.count("\n") == 1


def test_a_model_that_is_gone_or_another(listwise, index, tmp_path):
    (tmp_path / "model").rename(tmp_path / "moved")
    code, _, err = listwise("serve", index, "--port", 0)
    assert code == 2
    assert err.startswith(
        f"listwise: no model at {tmp_path / 'model'}, where the model of {index} was"
    )
    assert "--model" in err
    assert err.count("\n") == 1
    make_model(tmp_path / "other", 1)
    code, _, err = listwise("serve", index, "--port", 0, "--model", tmp_path / "other")
    assert code == 2
    assert f"{index} holds descriptors of the model" in err
    assert err.count("\n") == 1


def test_help_names_the_token(listwise):
    code, out, _ = listwise("serve", "--help")
    assert code == 0
    assert "LISTWISE_TOKEN" in out
    assert "--uploads" in out
