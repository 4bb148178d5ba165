"""A whole dpurt client with nothing but pyzmq, msgpack and the standard library, as one in another language would be written.

Stores one block and loads it back over the tcp fabric: ``python plain_client.py ENDPOINT``. The space is the one of `SPACE`.
"""

import hashlib
import socket
import struct
import sys

import msgpack
import zmq

SPACE = dict(model="m", revision="r", kv_dtype="fp16", tenant="t", block_tokens=4, token_bytes=4,
             groups=[dict(name="g", num_layers=1, num_kv_heads=1, head_size=8, part_bytes=8192, packing="kv",
                          window_tokens=None)])  # fmt: skip
SALT = b"sixteen bytes or more"


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 & -(crc & 1))
    return crc ^ 0xFFFFFFFF


def b2(data, size, key, person):
    return hashlib.blake2b(data, digest_size=size, key=key, person=person).digest()


def fingerprint():
    fields = [(k, SPACE[k]) for k in ("model", "revision", "kv_dtype")]
    fields += [("geometry.block_tokens", 4), ("geometry.token_bytes", 4), ("geometry.num_groups", 1)]
    fields += [(f"geometry.groups[0].{k}", SPACE["groups"][0][k]) for k in
               ("name", "num_layers", "num_kv_heads", "head_size", "part_bytes", "packing", "window_tokens")]  # fmt: skip
    fields += [
        ("tenant", "t"),
        ("tp_size", 1),
        ("pp_size", 1),
        ("lora_name", None),
        ("lora_version", None),
        ("epoch", 0),
    ]
    out = b"dpurt-space-1"
    for name, value in fields:
        tag, body = (
            (b"n", b"") if value is None else (b"i" if isinstance(value, int) else b"s", str(value).encode())
        )
        out += struct.pack("<I", len(name)) + name.encode() + tag + struct.pack("<Q", len(body)) + body
    return b2(out, 32, b2(SALT, 32, b"", b"dpurt.salt"), b"dpurt.space")


def call(sock, **request):
    sock.send(msgpack.packb({"id": 1, **request}))
    reply = msgpack.unpackb(sock.recv())
    assert reply["type"] != "error", reply
    return reply


def main(endpoint):
    control = zmq.Context().socket(zmq.DEALER)
    control.connect(endpoint)
    fp = fingerprint()
    tokens = struct.pack("<8i", 0, 1, 2, 3, -1, 2**31 - 1, 65536, 7)
    first = b2(bytes(16) + tokens, 16, fp, b"dpurt.tokens")
    vectors = [first, b2(first, 16, fp, b"dpurt.tokens"), b2(tokens, 16, fp, b"dpurt.digest")]
    hi = call(control, type="hello", host="plain", protocol=1, fabrics=["tcp"],
              spaces=[dict(SPACE, name="s", fingerprint=fp, vectors=vectors)])  # fmt: skip
    data = socket.create_connection((hi["fabric_address"]["host"], hi["fabric_address"]["port"]))
    data.sendall(struct.pack("<4sHHQ", b"DPT1", 0, len(hi["token"]), hi["session"]) + hi["token"])
    assert struct.unpack("<4sI", data.recv(8, socket.MSG_WAITALL))[1] == 0

    prompt, kv = struct.pack("<4i", 10, 20, 30, 40), bytes(range(256)) * 32
    [room] = call(control, type="reserve", space="s", request="r1", tokens=prompt, first=0, count=1)["blocks"]
    data.sendall(
        struct.pack("<IIQQQQ", 2, 1, room["region"], room["offset"], len(kv), room["reservation"]) + kv
    )
    assert struct.unpack("<II", data.recv(8, socket.MSG_WAITALL))[0] == 0
    print(
        call(
            control,
            type="commit",
            request="r1",
            blocks=[dict(reservation=room["reservation"], crcs=[crc32c(kv)])],
        )
    )

    print(call(control, type="lookup", space="s", request="r2", tokens=prompt))
    [grant] = call(control, type="load", request="r2", first=0, count=1)["blocks"]
    data.sendall(
        struct.pack("<IIQQQQ", 1, 1, grant["region"], grant["offset"], grant["length"], grant["lease"])
    )
    assert struct.unpack("<II", data.recv(8, socket.MSG_WAITALL))[0] == 0
    assert data.recv(grant["length"], socket.MSG_WAITALL) == kv
    call(control, type="release", leases=[grant["lease"]])
    print("the block came back, byte for byte")


if __name__ == "__main__":
    main(sys.argv[1])
