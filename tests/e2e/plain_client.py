"""A whole client in pyzmq, msgpack and the standard library: stores a block and loads it (arguments: the endpoint)."""

import hashlib
import socket
import struct
import sys

import msgpack
import zmq

SALT = b"sixteen bytes or more"
HEAD = {"model": "m", "revision": "r", "kv_dtype": "fp16", "block_tokens": 4, "token_bytes": 4}
GROUP = {"name": "g", "num_layers": 1, "num_kv_heads": 1, "head_size": 8, "part_bytes": 8192, "packing": "kv"}
TAIL = {"tenant": "t", "tp_size": 1, "pp_size": 1, "lora_name": None, "lora_version": None, "epoch": 0}


def crc32c(data, crc=0xFFFFFFFF):
    for bit in (byte >> i & 1 for byte in data for i in range(8)):
        crc = (crc >> 1) ^ (0x82F63B78 & -((crc ^ bit) & 1))
    return crc ^ 0xFFFFFFFF


def b2(data, size, key, person):
    return hashlib.blake2b(data, digest_size=size, key=key, person=b"dpurt." + person).digest()


def fingerprint():
    out = b"dpurt-space-1"
    geometry = {("geometry." * ("_tokens" in k or "_bytes" in k) + k): v for k, v in HEAD.items()}
    group = {"geometry.groups[0]." + k: v for k, v in (GROUP | {"window_tokens": None}).items()}
    for name, value in (geometry | {"geometry.num_groups": 1} | group | TAIL).items():
        tag = {str: b"s", int: b"i"}.get(type(value), b"n")
        body = b"" if value is None else str(value).encode()
        out += struct.pack("<I", len(name)) + name.encode() + tag + struct.pack("<Q", len(body)) + body
    return b2(out, 32, b2(SALT, 32, b"", b"salt"), b"space")


def call(control, kind, **fields):
    control.send(msgpack.packb({"type": kind, "id": 1, **fields}))
    return msgpack.unpackb(control.recv())


def move(link, op, place, permit, data=b""):
    region, at, length = place["region"], place.get("offset", 0), place["length"]  # zeros are not sent
    link.sendall(struct.pack("<IIQQQQ", op, 1, region, at, length, permit) + data)
    assert link.recv(8, socket.MSG_WAITALL)[:4] == bytes(4), "the access was refused"
    return link.recv(length, socket.MSG_WAITALL) if op == 1 else b""


def main(endpoint):
    control, fp = zmq.Context.instance().socket(zmq.DEALER), fingerprint()
    control.connect(endpoint)
    sample = struct.pack("<8i", 0, 1, 2, 3, -1, 2**31 - 1, 65536, 7)
    first = b2(bytes(16) + sample, 16, fp, b"tokens")
    vectors = [first, b2(first, 16, fp, b"tokens"), b2(sample, 16, fp, b"digest")]
    claim = {**HEAD, **TAIL, "name": "s", "groups": [GROUP], "fingerprint": fp, "vectors": vectors}
    hi = call(control, "hello", host="plain", protocol=1, fabrics=["tcp"], spaces=[claim])
    link = socket.create_connection((hi["fabric_address"]["host"], hi["fabric_address"]["port"]))
    link.sendall(struct.pack("<4sHHQ", b"DPT1", 0, len(hi["token"]), hi["session"]) + hi["token"])
    assert struct.unpack("<4sI", link.recv(8, socket.MSG_WAITALL))[1] == 0, "the link was denied"
    prompt, kv = struct.pack("<4i", 10, 20, 30, 40), bytes(range(256)) * 32
    [room] = call(control, "reserve", space="s", request="a", tokens=prompt, first=0, count=1)["blocks"]
    move(link, 2, room, room["reservation"], kv)
    written = {"reservation": room["reservation"], "crcs": [crc32c(kv)]}
    assert call(control, "commit", request="a", blocks=[written])["statuses"] == ["stored"]
    assert call(control, "lookup", space="s", request="b", tokens=prompt)["matched_blocks"] == 1
    [grant] = call(control, "load", request="b", first=0, count=1)["blocks"]
    assert move(link, 1, grant, grant["lease"]) == kv and crc32c(kv) == grant["crcs"][0]  # noqa: PT018
    assert call(control, "release", leases=[grant["lease"]])["count"] == 1
    print("the block came back, byte for byte")


main(sys.argv[1])
