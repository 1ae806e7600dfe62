"""What only a server can do wrong: it throttles, hangs up, loses replies, forbids."""

import http.server
import json
import os
import socket
import threading

import pytest

from data_contracts.errors import ConfigError, ObjectExists, ObjectMissing, StoreError
from data_contracts.records import Control
from infra.log import Log
from infra.store import open_store
from infra.store_s3 import PART_BYTES


def test_waits_out_throttling(small_s3):
    server = small_s3()
    store = open_store("s3://bucket/run")
    for method, use in {
        "PUT": lambda: store.put_new("a", b"x"),
        "GET": lambda: store.get("a"),
        "HEAD": lambda: store.exists("a"),
    }.items():
        server.faults[method] = ["503", "503"]
        use()
        assert server.requests[method] == 3
    assert server.objects == {"/bucket/run/a": b"x"}


def test_tries_again_when_a_server_hangs_up(small_s3):
    server = small_s3()
    store = open_store("s3://bucket")
    server.faults = {"PUT": ["no reply"], "GET": ["no reply", "503", "no reply"]}
    store.put_new("a", b"x")
    assert store.get("a") == b"x"


def test_gives_up_after_its_budget_with_one_sentence(small_s3):
    server = small_s3()
    store = open_store("s3://bucket", retry_s=0.3)
    server.faults["PUT"] = ["503"] * 100
    with pytest.raises(
        StoreError, match=r"s3://bucket/a: could not be written: 503 Service Unavailable \(SlowDown\), tried \d"
    ):
        store.put_new("a", b"x")
    assert 1 < server.requests["PUT"] < 20


def test_what_is_forbidden_fails_at_once_without_naming_keys(small_s3):
    server = small_s3()
    store = open_store("s3://bucket")
    server.faults["PUT"] = ["403"]
    with pytest.raises(StoreError, match=r"403 Forbidden \(AccessDenied\); check AWS_ACCESS_KEY_ID") as refused:
        store.put_new("a", b"x")
    assert server.requests["PUT"] == 1
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__
    assert "the-key-id" not in str(refused.value)
    assert "the-secret-key" not in str(refused.value)


def test_nobody_there_is_one_sentence(small_s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused_port()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(StoreError, match="could not be read: no reply, tried"):
        open_store("s3://bucket", retry_s=0.2).get("a")


def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("status", ["409", "412"])
def test_conflict_and_failed_precondition_mean_the_same(small_s3, status):
    server = small_s3()
    store = open_store("s3://bucket")
    server.objects["/bucket/a"] = b"theirs"
    server.faults["PUT"] = [status]
    with pytest.raises(ObjectExists, match="s3://bucket/a: exists already"):
        store.put_new("a", b"ours")
    assert server.requests["PUT"] == 1


def test_after_a_lost_reply_the_key_is_taken_by_ones_own_bytes(small_s3):
    server = small_s3()
    store = open_store("s3://bucket")
    server.faults["PUT"] = ["lost reply"]
    with pytest.raises(ObjectExists):
        store.put_new("a", b"ours")
    server.faults["PUT"] = ["lost reply"]
    assert store.put_or_get("b", b"ours") == b"ours"
    assert server.requests["PUT"] == 4


def test_a_conflict_before_the_winner_is_visible_is_waited_out(small_s3):
    server = small_s3()
    server.faults["PUT"] = ["late"] * 3
    assert open_store("s3://bucket").put_or_get("a", b"ours") == b"theirs"
    server.faults["PUT"] = ["409"]  # nobody won at all: a delete was in the way
    assert open_store("s3://bucket").put_or_get("b", b"ours") is None


def test_a_missing_bucket_is_not_an_empty_one(s3_url, monkeypatch):
    store = open_store("s3://no-such-bucket/run")
    for use in (store.get, lambda key: store.put_new(key, b"x"), store.list):
        with pytest.raises(StoreError, match="s3://no-such-bucket/.*there is no such bucket") as refused:
            use("a")
        assert not isinstance(refused.value, ObjectMissing)


def test_large_objects_go_up_whole_and_come_down_in_parts(s3_url):
    store = open_store(s3_url)
    body = os.urandom(1000) * (PART_BYTES // 1000 + 2000)
    assert PART_BYTES < len(body) < 2 * PART_BYTES
    store.put_new("weights", body)
    assert store.get("weights") == body
    with pytest.raises(ObjectExists):
        store.put_new("weights", body + b"!")
    assert store.get_many(["weights", "none", "weights"]) == [body, None, body]


def test_reads_run_at_once_where_each_waits_for_a_network(small_s3):
    server = small_s3()
    store = open_store("s3://bucket")
    log = Log(store, "log/control", Control)
    records = [Control(writer="me", kind="start", detail={"n": n}) for n in range(60)]
    for number, record in enumerate(records):
        log.append(number, record)
    server.seconds, server.most_open = 0.03, 0
    assert Log(store, "log/control", Control).read_from(0) == records
    assert 8 <= server.most_open <= store.parallel_reads
    server.most_open = 0
    assert log.read(60) is None  # a look for the next record is one request
    assert server.most_open == 1


def test_refuses_plain_http_to_another_machine(s3_url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://storage.example:9000")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL is plain http on another machine"):
        open_store("s3://bucket")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    open_store("s3://bucket")


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_ENDPOINT_URL", "localhost:9000"), ("AWS_SECRET_ACCESS_KEY", "hunter2\n"), ("AWS_SECRET_ACCESS_KEY", None)],
)
def test_refuses_variables_that_make_no_client(s3_url, monkeypatch, name, value):
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"s3://bucket: .*(AWS_|Missing SecretAccessKey)") as refused:
        open_store("s3://bucket")
    assert "hunter2" not in str(refused.value)


def test_reads_keys_from_the_profile_files(small_s3, monkeypatch, tmp_path):
    server = small_s3()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    with pytest.raises(ConfigError, match="no credentials; set AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket")
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = profile-id\naws_secret_access_key = s\n")
    (tmp_path / "config").write_text("[profile team]\nregion = eu-central-1\n")
    monkeypatch.delenv("AWS_REGION")
    open_store("s3://bucket").put_new("a", b"x")
    assert "Credential=profile-id/" in server.authorizations[-1]
    assert "/eu-central-1/s3/" in server.authorizations[-1]


def test_a_profile_may_name_a_program_that_prints_keys(small_s3, monkeypatch, tmp_path):
    server = small_s3()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    keys = {"Version": 1, "AccessKeyId": "printed-id", "SecretAccessKey": "s", "SessionToken": "t"}
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {tmp_path / 'keys.json'}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    open_store("s3://bucket").put_new("a", b"x")
    assert "Credential=printed-id/" in server.authorizations[-1]
    (tmp_path / "keys.json").write_text("hunter2")
    with pytest.raises((ConfigError, StoreError)) as refused:
        open_store("s3://bucket", retry_s=0.2).get("a")
    assert "hunter2" not in str(refused.value)


class Metadata(http.server.BaseHTTPRequestHandler):
    """The service that gives an instance its keys."""

    def log_message(self, *_):
        pass

    def do_PUT(self):
        self.answer("a-token")

    def do_GET(self):
        role = "/latest/meta-data/iam/security-credentials/"
        keys = {"AccessKeyId": "instance-id", "SecretAccessKey": "s", "Token": "t", "Code": "Success"}
        times = {"LastUpdated": "2026-01-01T00:00:00Z", "Expiration": "2100-01-01T00:00:00Z", "Type": "AWS-HMAC"}
        self.answer("role" if self.path == role else json.dumps(keys | times))

    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def test_an_instance_gets_its_keys_from_its_metadata_service(small_s3, monkeypatch, tmp_path):
    server = small_s3()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as metadata:
        thread = threading.Thread(target=metadata.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{metadata.server_address[1]}")
        open_store("s3://bucket").put_new("a", b"x")
        metadata.shutdown()
        thread.join()
    assert "Credential=instance-id/" in server.authorizations[-1]
