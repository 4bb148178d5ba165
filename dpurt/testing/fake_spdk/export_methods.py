"""RPC methods that let others have a bdev of the fake target: vhost controllers, NVMe-oF subsystems."""

from __future__ import annotations

from dpurt.testing.fake_spdk.declare import INTERNAL, INVALID_PARAMS, Params, RpcFailure, method
from dpurt.testing.fake_spdk.state import FakeTarget, Listener, Namespace, Subsystem, VhostBlk


@method("*ctrlr:str *dev_name:str readonly:bool packed_ring:bool cpumask:str transport:str", INVALID_PARAMS)
def vhost_create_blk_controller(target: FakeTarget, params: Params) -> object:
    bdev = target.find(params["dev_name"])
    if bdev is None:
        raise RpcFailure(INVALID_PARAMS, "No such device")
    if params["ctrlr"] in target.vhost:
        raise RpcFailure(INVALID_PARAMS, "File exists")
    if bdev.claim:
        raise RpcFailure(INVALID_PARAMS, "Operation not permitted")
    target.vhost[params["ctrlr"]] = VhostBlk(params["ctrlr"], bdev, bool(params.get("readonly")))
    target.tell("vhost_created", params["ctrlr"])
    return True


@method("name:str", INVALID_PARAMS)
def vhost_get_controllers(target: FakeTarget, params: Params) -> object:
    return [
        {
            "ctrlr": blk.ctrlr, "cpumask": "0x1", "socket": f"{target.vhost_dir}/{blk.ctrlr}", "sessions": [],
            "backend_specific": {"block": {"readonly": blk.readonly, "bdev": blk.bdev.name}},
        }
        for blk in target.vhost.values()
    ]  # fmt: skip


@method("*ctrlr:str", INVALID_PARAMS)
def vhost_delete_controller(target: FakeTarget, params: Params) -> object:
    blk = target.vhost.pop(params["ctrlr"], None)
    if blk is None:
        raise RpcFailure(INVALID_PARAMS, "No such device")
    target.tell("vhost_deleted", params["ctrlr"])
    return True


@method(
    "*trtype:str max_io_size:int max_queue_depth:int in_capsule_data_size:int c2h_success:bool zcopy:bool"
)
def nvmf_create_transport(target: FakeTarget, params: Params) -> object:
    if params["trtype"].upper() in target.transports:
        raise RpcFailure(INTERNAL, f"Transport type '{params['trtype']}' already exists")
    made = {"max_io_size": 131072, "max_queue_depth": 128, "in_capsule_data_size": 4096, **params}
    target.transports[params["trtype"].upper()] = {**made, "trtype": params["trtype"].upper()}
    return True


@method("trtype:str")
def nvmf_get_transports(target: FakeTarget, params: Params) -> object:
    return list(target.transports.values())


@method(
    "*nqn:str serial_number:str model_number:str max_namespaces:int allow_any_host:bool ana_reporting:bool"
)
def nvmf_create_subsystem(target: FakeTarget, params: Params) -> object:
    nqn = params["nqn"]
    if nqn in target.subsystems:
        raise RpcFailure(INTERNAL, f"Unable to create subsystem {nqn}")
    target.subsystems[nqn] = Subsystem(
        nqn,
        params.get("serial_number", "0" * 20),
        bool(params.get("allow_any_host")),
        bool(params.get("ana_reporting")),
        params.get("max_namespaces", 32),
    )
    return True


def _subsystem(target: FakeTarget, nqn: str) -> Subsystem:
    found = target.subsystems.get(nqn)
    if found is None:
        raise RpcFailure(INVALID_PARAMS, f"Subsystem with NQN '{nqn}' not found")
    return found


@method("*nqn:str", INVALID_PARAMS)
def nvmf_delete_subsystem(target: FakeTarget, params: Params) -> object:
    subsystem = _subsystem(target, params["nqn"])
    for nsid in list(subsystem.namespaces):
        subsystem.namespaces.pop(nsid).bdev.claim = ""
    del target.subsystems[params["nqn"]]
    target.tell("subsystem_deleted", params["nqn"])
    return True


@method("nqn:str", INVALID_PARAMS)
def nvmf_get_subsystems(target: FakeTarget, params: Params) -> object:
    return [
        {
            "nqn": one.nqn,
            "subtype": "NVMe",
            "listen_addresses": [listener.shown() for listener in one.listeners],
            "allow_any_host": one.allow_any_host,
            "hosts": [{"nqn": host} for host in one.hosts],
            "serial_number": one.serial_number,
            "max_namespaces": one.max_namespaces,
            "namespaces": [
                {
                    "nsid": space.nsid,
                    "bdev_name": space.bdev.name,
                    "name": space.bdev.name,
                    "uuid": space.bdev.uuid,
                }
                for space in one.namespaces.values()
            ],
        }
        for one in target.subsystems.values()
    ]


@method("*nqn:str *namespace:dict", INVALID_PARAMS)
def nvmf_subsystem_add_ns(target: FakeTarget, params: Params) -> object:
    subsystem = _subsystem(target, params["nqn"])
    bdev = target.find(params["namespace"].get("bdev_name", ""))
    nsid = params["namespace"].get("nsid") or max(subsystem.namespaces, default=0) + 1
    if bdev is None or bdev.claim or nsid in subsystem.namespaces:
        raise RpcFailure(INVALID_PARAMS, "Invalid parameters")
    bdev.claim = "nvmf"
    subsystem.namespaces[nsid] = Namespace(nsid, bdev)
    target.tell("namespace_added", params["nqn"])
    return nsid


@method("*nqn:str *nsid:int", INVALID_PARAMS)
def nvmf_subsystem_remove_ns(target: FakeTarget, params: Params) -> object:
    space = _subsystem(target, params["nqn"]).namespaces.pop(params["nsid"], None)
    if space is None:
        raise RpcFailure(INVALID_PARAMS, "Invalid parameters")
    space.bdev.claim = ""
    target.tell("namespace_removed", params["nqn"])
    return True


def _listener(params: Params) -> Listener:
    given = params["listen_address"]
    try:
        return Listener(
            given["trtype"].upper(), given.get("adrfam", "IPv4"), given["traddr"], given["trsvcid"]
        )
    except (KeyError, AttributeError) as error:
        raise RpcFailure(INVALID_PARAMS, "spdk_json_decode_object failed") from error


@method("*nqn:str *listen_address:dict", INVALID_PARAMS)
def nvmf_subsystem_add_listener(target: FakeTarget, params: Params) -> object:
    listener = _listener(params)
    subsystem = _subsystem(target, params["nqn"])
    if listener.trtype not in target.transports or listener in subsystem.listeners:
        raise RpcFailure(INVALID_PARAMS, "Invalid parameters")
    subsystem.listeners.append(listener)
    target.tell("listener_added", params["nqn"])
    return True


@method("*nqn:str *listen_address:dict", INVALID_PARAMS)
def nvmf_subsystem_remove_listener(target: FakeTarget, params: Params) -> object:
    listener = _listener(params)
    subsystem = _subsystem(target, params["nqn"])
    if listener not in subsystem.listeners:
        raise RpcFailure(INVALID_PARAMS, "Invalid parameters")
    subsystem.listeners.remove(listener)
    target.tell("listener_removed", params["nqn"])
    return True


@method("*nqn:str *listen_address:dict *ana_state:str anagrpid:int", INVALID_PARAMS)
def nvmf_subsystem_listener_set_ana_state(target: FakeTarget, params: Params) -> object:
    wanted = _listener(params)
    for listener in _subsystem(target, params["nqn"]).listeners:
        if listener == wanted:
            listener.ana_state = params["ana_state"]
            target.tell("ana_changed", params["nqn"])
            return True
    raise RpcFailure(INVALID_PARAMS, "Invalid parameters")


@method("*nqn:str *host:str", INVALID_PARAMS)
def nvmf_subsystem_add_host(target: FakeTarget, params: Params) -> object:
    subsystem = _subsystem(target, params["nqn"])
    if params["host"] not in subsystem.hosts:
        subsystem.hosts.append(params["host"])
    return True
