import pickle
import subprocess
import sys

import pytest

from nereus.cluster import (
    ACCELERATORS,
    Link,
    cluster_from,
    known_accelerator,
    load_cluster,
    log_distance,
    parse_cluster,
    similar_accelerator,
)
from nereus.errors import ClusterError

GB = 10**9


def test_a_short_form_gives_nodes_times_devices_of_one_type():
    cluster = parse_cluster("2x8xH200")
    assert cluster.num_devices == 16
    assert {len(devices) for devices in cluster.nodes.values()} == {8}
    assert cluster.link(0, 7) is Link.INTRA_NODE
    assert cluster.link(7, 8) is Link.INTER_NODE
    assert cluster.device(15).memory_bytes == 141 * GB


@pytest.mark.parametrize("text", ["8xh200", "2x8xh900", "0x8xh200", "h200"])
def test_a_cluster_that_cannot_be_read_is_refused(text):
    with pytest.raises(ClusterError):
        parse_cluster(text)


def test_an_unknown_type_lists_the_known_ones():
    with pytest.raises(ClusterError, match="h100"):
        parse_cluster("1x8xh900")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("A100-80G", "a100"),
        ("A100-40G", "a100-40gb"),
        ("AMD-Instinct-MI300X-OAM", "mi300x"),
        ("AMD-Instinct-MI250X-MI250", "mi250x"),
    ],
)
def test_names_of_drivers_and_users_mean_the_same_type(written, name):
    assert known_accelerator(written).name == name


def test_a_type_of_a_known_model_is_like_its_nearest_relative():
    like = similar_accelerator("A10G")
    assert like.name == "a10g" and like.flops_per_s == ACCELERATORS["a10"].flops_per_s
    assert similar_accelerator("NVIDIA A100-PCIE-40GB", memory_bytes=42 * GB).memory_bytes_per_s == 1555 * GB
    with pytest.raises(ClusterError, match="K80"):
        similar_accelerator("K80")


def test_yaml_describes_mixed_types_and_counts_that_are_no_powers_of_two(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        """
nodes:
  - {count: 3, devices: 7, accelerator: h200}
  - {name: old, devices: 6, accelerator: a100, memory_gb: 40}
links: {inter_gb_per_s: 12.5}
cores_per_node: 2
"""
    )
    cluster = load_cluster(str(path))
    assert [len(devices) for devices in cluster.nodes.values()] == [7, 7, 7, 6]
    assert cluster.device(21).accelerator == "a100"
    assert cluster.device(21).memory_bytes == 40 * GB
    assert cluster.accelerator("a100").inter_node_bytes_per_s == 12.5 * GB
    assert cluster.accelerator("h200").memory_bytes == 141 * GB
    assert cluster.cores_per_node == 2


def test_yaml_may_describe_a_type_the_table_lacks():
    figures = {"tflops": 400, "memory_gb": 64, "memory_gb_per_s": 2000, "intra_gb_per_s": 200, "inter_gb_per_s": 25}
    cluster = cluster_from({"nodes": [{"devices": 2, "accelerator": "mychip"}], "accelerators": {"mychip": figures}})
    assert cluster.accelerator("mychip").flops_per_s == 400e12
    with pytest.raises(ClusterError, match="accelerators"):
        cluster_from({"nodes": [{"devices": 2, "accelerator": "mychip"}], "accelerators": {"mychip": {"tflops": 1}}})


@pytest.mark.parametrize(
    ("described", "named"),
    [
        ({"nodes": []}, "nodes"),
        ({"nodes": [{"devices": 0, "accelerator": "h200"}]}, "devices"),
        ({"nodes": [{"device": 8}]}, "device"),
        ({"nodes": [{"devices": 8, "memory_gb": -1}]}, "memory_gb"),
        ({"nodes": [{"name": "a"}, {"name": "a"}]}, "'a'"),
        ({"nodes": [{"devices": 1}], "links": {"speed": 1}}, "speed"),
        ("8 nodes", "nodes"),
    ],
)
def test_a_described_cluster_that_is_wrong_names_the_key(described, named):
    with pytest.raises(ClusterError, match=named):
        cluster_from(described)


def test_a_cluster_file_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(ClusterError, match="nowhere.yaml"):
        load_cluster(str(tmp_path / "nowhere.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("nodes: [")
    with pytest.raises(ClusterError, match="broken.yaml"):
        load_cluster(str(broken))


def test_the_nearest_accelerator_is_the_one_with_the_closest_peaks():
    def nearest(name):
        others = (ACCELERATORS[other] for other in ("a100", "h100", "b200", "l40s"))
        return min(others, key=lambda other: log_distance(ACCELERATORS[name], other)).name

    assert [nearest(name) for name in ("h200", "a800", "gb200", "l40s")] == ["h100", "a100", "b200", "l40s"]


def test_a_cluster_that_was_sent_to_another_process_equals_itself_there():
    sent = pickle.dumps(parse_cluster("2x4xh100"))
    code = (
        "import pickle, sys\n"
        "from nereus.cluster import parse_cluster\n"
        "cluster = pickle.loads(sys.stdin.buffer.read())\n"
        "assert {cluster: 1}[parse_cluster('2x4xh100')] == 1\n"
    )
    cluster = pickle.loads(sent)
    hash(cluster)
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(cluster), check=True, timeout=60)


@pytest.mark.parametrize(
    "text, named",
    [
        ("nodes: 3", "nodes: expected a list"),
        ("nodes: abc", "nodes: expected a list"),
        ("nodes: [{devices: 8, accelerator: h100, memory_gb: .nan}]", "memory_gb"),
        ("nodes: [{devices: 8, accelerator: h100, memory_gb: .inf}]", "memory_gb"),
        ("{nodes: [{devices: 8, accelerator: h100}], links: {inter_gb_per_s: .nan}}", "inter_gb_per_s"),
        ("{nodes: [{devices: 8, accelerator: h100}], accelerators: abc}", "accelerators: expected types by name"),
        ("{nodes: [{devices: 8, accelerator: h100}], accelerators: {h20x: {memory_gb: 9}}}", "no node has h20x"),
        ("nodes: [{count: 1000000000, devices: 8, accelerator: h100}]", "1048576 at most"),
        ("nodes: [{", "not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
)
def test_what_a_cluster_file_cannot_say_is_refused_in_one_line(tmp_path, text, named):
    source = tmp_path / "cluster.yaml"
    source.write_text(text)
    with pytest.raises(ClusterError, match=named) as error:
        load_cluster(str(source))
    assert str(source) in str(error.value) and "\n" not in str(error.value)


def test_a_cluster_too_large_to_be_meant_is_refused_at_once():
    with pytest.raises(ClusterError, match="1048576 at most"):
        parse_cluster("10000000x8xh100")


def test_a_correction_counts_for_every_spelling_of_a_type():
    rows = [{"devices": 1, "accelerator": name} for name in ("H100", "NVIDIA H100 80GB HBM3", "h100")]
    found = cluster_from({"nodes": rows, "accelerators": {"h100-sxm": {"memory_gb": 20}}})
    assert {device.memory_bytes for device in found.devices} == {20 * GB}
