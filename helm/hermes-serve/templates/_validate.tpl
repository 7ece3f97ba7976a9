{{/* What the schema cannot say: every combination that cannot work ends the rendering with one sentence. */}}

{{- define "hermes.validate" -}}
{{- include "hermes.validateOwned" . -}}
{{- include "hermes.validateNames" . -}}
{{- include "hermes.validateSecrets" . -}}
{{- include "hermes.validateSizes" . -}}
{{- include "hermes.validateModel" . -}}
{{- include "hermes.validateDoors" . -}}
{{- include "hermes.validateNetwork" . -}}
{{- include "hermes.validateMonitoring" . -}}
{{- end }}

{{- define "hermes.validateNames" -}}
{{- if gt (len .Release.Name) 47 }}
{{- fail (printf "the release name %q has %d characters, and KubeRay takes 47 at most: choose a shorter one" .Release.Name (len .Release.Name)) }}
{{- end }}
{{- if and .Values.redis.internal.enabled (gt (len .Release.Name) 46) }}
{{- fail (printf "the release name %q has %d characters, and a Redis beside it leaves 46: Kubernetes adds to the name of a StatefulSet" .Release.Name (len .Release.Name)) }}
{{- end }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name) }}
{{- fail (printf "the release name %q must begin with a letter and hold only a-z, 0-9 and '-': it becomes the name of a RayService" .Release.Name) }}
{{- end }}
{{- if not .Values.image.repository }}
{{- fail "image.repository is empty: build cluster/docker/gpu.Dockerfile or cpu.Dockerfile, push it, and name it here" }}
{{- end }}
{{- range $path, $image := dict "image" .Values.image "redis.internal.image" .Values.redis.internal.image "redis.internal.exporter.image" .Values.redis.internal.exporter.image }}
{{- if eq $image.tag "latest" }}
{{- fail (printf "%s.tag is 'latest', which is another image every day: name a version or a digest" $path) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What somebody else sets already, and what must not be set otherwise. */}}
{{- define "hermes.validateOwned" -}}
{{- if hasPrefix "RAY" .Values.settings.namespace }}
{{- fail (printf "settings.namespace is %q, but what begins with RAY in Redis is Ray's own: choose another" .Values.settings.namespace) }}
{{- end }}
{{- $owners := dict "model" "model.source" "served_model_name" "model.name" "tensor_parallel_size" "workers.tensor_parallel_size" "max_num_seqs" "workers.max_running_requests" "otlp_traces_endpoint" "telemetry.traces_endpoint" -}}
{{- range $key, $_ := .Values.settings.engine.args }}
{{- with get $owners (replace "-" "_" $key) }}
{{- fail (printf "settings.engine.args.%s is what settings.%s says, to the rest of the service too: set that one" $key .) }}
{{- end }}
{{- end }}
{{- range list "HERMES_REDIS_URL" "HERMES_REDIS_PASSWORD" "HF_TOKEN" "RAY_AUTH_MODE" "RAY_AUTH_TOKEN" "RAY_REDIS_ADDRESS" "REDIS_USERNAME" "REDIS_PASSWORD" "RAY_enable_autoscaler_v2" }}
{{- if hasKey $.Values.env . }}
{{- fail (printf "env.%s is set by the chart or by KubeRay, from a Secret where it is one: remove it" .) }}
{{- end }}
{{- end }}
{{- if and (hasKey .Values.env "RAY_SERVE_ENABLE_HA_PROXY") (ne .Values.env.RAY_SERVE_ENABLE_HA_PROXY "1") }}
{{- fail "env.RAY_SERVE_ENABLE_HA_PROXY is not '1': probes, Services and the network policy count on HAProxy; remove it" }}
{{- end }}
{{- end }}

{{- define "hermes.validateSecrets" -}}
{{- $redis := .Values.redis -}}
{{- if and .Values.auth.enabled (not .Values.auth.existingSecret) }}
{{- fail "auth.existingSecret is empty: make a Secret with the keys (docs/kubernetes.md has the line) and name it, or set auth.enabled=false on a network you trust" }}
{{- end }}
{{- if and $redis.internal.enabled $redis.external.enabled }}
{{- fail "redis.internal.enabled and redis.external.enabled are both true: choose one" }}
{{- end }}
{{- if not (or $redis.internal.enabled $redis.external.enabled) }}
{{- fail "redis.internal.enabled and redis.external.enabled are both false: choose one" }}
{{- end }}
{{- if and $redis.internal.enabled (not $redis.internal.existingSecret) }}
{{- fail "redis.internal.existingSecret is empty: make a Secret with the passwords (docs/kubernetes.md has the line) and name it" }}
{{- end }}
{{- if $redis.external.enabled }}
{{- if not $redis.external.existingSecret }}
{{- fail "redis.external.existingSecret is empty: make a Secret that holds the URL and name it" }}
{{- end }}
{{- if and .Values.gcsFaultTolerance.enabled (not $redis.external.gcsAddress) }}
{{- fail "redis.external.gcsAddress is empty: name host:port for Ray's GCS, or set gcsFaultTolerance.enabled=false" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (not $redis.external.cidrs) }}
{{- fail "redis.external.cidrs is empty: the network policy must know where Redis is; name its addresses, or set networkPolicy.enabled=false" }}
{{- end }}
{{- if .Values.gcsFaultTolerance.enabled }}
{{- $port := regexFind "[0-9]+$" $redis.external.gcsAddress -}}
{{- if and .Values.networkPolicy.enabled (not (has $port (toStrings $redis.external.ports))) }}
{{- fail (printf "redis.external.gcsAddress has the port %s, which is not among redis.external.ports: the network policy would stop Ray's GCS" $port) }}
{{- end }}
{{- if and $redis.external.caKey (not (hasPrefix "rediss://" $redis.external.gcsAddress)) }}
{{- fail (printf "redis.external.caKey is set, but redis.external.gcsAddress (%s) is not rediss://host:port: Ray's GCS would speak without TLS" $redis.external.gcsAddress) }}
{{- end }}
{{- end }}
{{- if $redis.internal.exporter.enabled }}
{{- fail "redis.internal.exporter.enabled needs redis.internal: watch an external Redis where it runs" }}
{{- end }}
{{- end }}
{{- if and .Values.hub.existingSecret (not .Values.hub.access) }}
{{- fail "hub.existingSecret names a token, but hub.access is false: nothing would use it" }}
{{- end }}
{{- end }}

{{- define "hermes.validateSizes" -}}
{{- $workers := .Values.settings.workers -}}
{{- $gpu := eq $workers.device "gpu" -}}
{{- if and $gpu (lt (float64 .Values.engines.gpus) (float64 (include "hermes.gpusPerEngine" .))) }}
{{- fail (printf "one engine takes %s GPUs (settings.workers.tensor_parallel_size), but a pod has %v (engines.gpus): an engine must fit into one pod" (include "hermes.gpusPerEngine" .) .Values.engines.gpus) }}
{{- end }}
{{- if and (not $gpu) .Values.engines.gpus }}
{{- fail (printf "engines.gpus is %v, but settings.workers.device is 'cpu': set engines.gpus=0" .Values.engines.gpus) }}
{{- end }}
{{- with $workers.autoscaling }}
{{- if gt (int .min_replicas) (int .max_replicas) }}
{{- fail (printf "settings.workers.autoscaling.min_replicas (%v) is above max_replicas (%v)" .min_replicas .max_replicas) }}
{{- end }}
{{- end }}
{{- $engines := include "hermes.enginesPerPod" . | int -}}
{{- if lt (float64 .Values.engines.cpus) (mulf $engines (float64 $workers.cpus_per_replica)) }}
{{- fail (printf "%d engines in one pod reserve %v CPUs each (settings.workers.cpus_per_replica), but the pod has %v (engines.cpus)" $engines $workers.cpus_per_replica .Values.engines.cpus) }}
{{- end }}
{{- if lt $engines 1 }}
{{- fail (printf "no engine fits into a pod: it reserves %v CPUs (settings.workers.cpus_per_replica), and the pod has %v (engines.cpus)" $workers.cpus_per_replica .Values.engines.cpus) }}
{{- end }}
{{- $ingress := .Values.settings.ingress -}}
{{- if lt (float64 .Values.ingressPods.cpus) (mulf (include "hermes.ingressesPerPod" . | float64) (float64 $ingress.cpus_per_replica)) }}
{{- fail (printf "%v ingresses with %v CPUs each (settings.ingress) do not fit into %v pods of %v CPUs (ingressPods)" $ingress.replicas $ingress.cpus_per_replica .Values.ingressPods.replicas .Values.ingressPods.cpus) }}
{{- end }}
{{- with $ingress.max_replicas_per_node }}
{{- if lt (mul . $.Values.ingressPods.replicas) (int64 $ingress.replicas) }}
{{- fail (printf "%v ingresses (settings.ingress.replicas), %v to a pod at most (max_replicas_per_node), do not fit into %v pods (ingressPods.replicas)" $ingress.replicas . $.Values.ingressPods.replicas) }}
{{- end }}
{{- end }}
{{- if gt (float64 $ingress.request_timeout_s) (float64 $ingress.max_request_timeout_s) }}
{{- fail (printf "settings.ingress.request_timeout_s (%v) is above max_request_timeout_s (%v)" $ingress.request_timeout_s $ingress.max_request_timeout_s) }}
{{- end }}
{{- $redis := .Values.redis.internal -}}
{{- $full := include "hermes.mebibytes" $redis.maxmemory | int -}}
{{- if gt (mul 10 $full) (mul 7 (include "hermes.mebibytes" $redis.memory | int)) }}
{{- fail (printf "redis.internal.maxmemory (%s) is above 70 %% of redis.internal.memory (%s): rewriting the append-only file takes room besides" $redis.maxmemory $redis.memory) }}
{{- end }}
{{- if gt (mul 2 $full) (include "hermes.mebibytes" $redis.persistence.size | int) }}
{{- fail (printf "redis.internal.maxmemory (%s) is above half of redis.internal.persistence.size (%s): the old append-only file and the new one stand there together" $redis.maxmemory $redis.persistence.size) }}
{{- end }}
{{- end }}

{{- define "hermes.validateModel" -}}
{{- $model := .Values.settings.model -}}
{{- $weights := .Values.weights -}}
{{- if not (and $model.name $model.source) }}
{{- fail "settings.model.name and settings.model.source are needed: what clients call the model, and where it comes from" }}
{{- end }}
{{- if and $weights.create $weights.existingClaim }}
{{- fail "weights.create and weights.existingClaim are both set: choose one" }}
{{- end }}
{{- if hasPrefix "/" $model.source }}
{{- if not (include "hermes.weightsClaim" .) }}
{{- fail (printf "settings.model.source is the path %s, but there is no volume: set weights.existingClaim or weights.create" $model.source) }}
{{- end }}
{{- if not (hasPrefix (printf "%s/" $weights.mountPath) $model.source) }}
{{- fail (printf "settings.model.source (%s) is not below weights.mountPath (%s)" $model.source $weights.mountPath) }}
{{- end }}
{{- else if and (not (hasPrefix "builtin:" $model.source)) (not .Values.hub.access) }}
{{- if not (include "hermes.weightsClaim" .) }}
{{- fail (printf "settings.model.source (%s) is a hub id, but hub.access is false and there is no volume: nothing could load it" $model.source) }}
{{- end }}
{{- if and $weights.readOnly (not (hasKey .Values.env "HF_HOME")) }}
{{- fail (printf "settings.model.source (%s) is a hub id, but hub.access is false: name a path below weights.mountPath, or, for a volume with the hub's own files, env.HF_HOME" $model.source) }}
{{- end }}
{{- end }}
{{- if $weights.create }}
{{- if $weights.readOnly }}
{{- fail "weights.create makes an empty volume, and weights.readOnly lets nobody fill it: set weights.readOnly=false" }}
{{- end }}
{{- if not (or (has "ReadWriteMany" $weights.accessModes) (has "ReadWriteOnce" $weights.accessModes)) }}
{{- fail "weights.accessModes has neither ReadWriteMany nor ReadWriteOnce, but engines write to the volume" }}
{{- end }}
{{- if not (has "ReadWriteMany" $weights.accessModes) }}
{{- if gt (include "hermes.maxEnginePods" . | int) 1 }}
{{- fail (printf "weights.accessModes has no ReadWriteMany, but up to %s engine pods share the volume" (include "hermes.maxEnginePods" .)) }}
{{- end }}
{{- if eq .Values.upgrade.type "NewCluster" }}
{{- fail "weights.accessModes has no ReadWriteMany, but a second Ray cluster, on other nodes, takes over at an upgrade: set upgrade.type=None" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "hermes.validateDoors" -}}
{{- if and .Values.ingress.enabled .Values.httpRoute.enabled }}
{{- fail "ingress.enabled and httpRoute.enabled are both true: choose one" }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) }}
{{- fail "ingress.host is empty: name the host that clients call" }}
{{- end }}
{{- if .Values.httpRoute.enabled }}
{{- if not .Values.httpRoute.hosts }}
{{- fail "httpRoute.hosts is empty: name the hosts that clients call" }}
{{- end }}
{{- if not .Values.httpRoute.parentRefs }}
{{- fail "httpRoute.parentRefs is empty: name the Gateway" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "hermes.validateNetwork" -}}
{{- if and .Values.networkPolicy.enabled (or .Values.ingress.enabled .Values.httpRoute.enabled) (not .Values.networkPolicy.servingFrom) }}
{{- fail "networkPolicy.servingFrom is empty, so only this namespace may call: name the peers of your ingress controller or Gateway" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.settings.workers.autoscaling (not .Values.networkPolicy.apiServerCidrs) }}
{{- fail "networkPolicy.apiServerCidrs is empty, so the autoscaler (settings.workers.autoscaling) could not ask for pods: name the addresses of the Kubernetes API" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.hub.access (not .Values.networkPolicy.hubCidrs) }}
{{- fail "networkPolicy.hubCidrs is empty, so nothing could be fetched, though hub.access is true: name the addresses of the hub" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.settings.telemetry.traces_endpoint (not .Values.networkPolicy.tracesTo) }}
{{- fail "networkPolicy.tracesTo is empty, so no trace would reach settings.telemetry.traces_endpoint: name the collector's peers" }}
{{- end }}
{{- end }}

{{- define "hermes.validateMonitoring" -}}
{{- $port := int .Values.settings.telemetry.process_port -}}
{{- if and .Values.monitoring.podMonitors (eq .Values.monitoring.mode "pods") (eq $port 0) }}
{{- fail "monitoring.mode=pods needs settings.telemetry.process_port: the first port of the pages" }}
{{- end }}
{{- if $port }}
{{- range list 6379 8000 8080 8265 8404 8500 9101 10001 44217 44227 52365 }}
{{- if and (le $port .) (lt . (add $port 64)) }}
{{- fail (printf "settings.telemetry.process_port (%d) and the 63 ports above it meet port %d of Ray or HAProxy: choose another, such as 9200" $port .) }}
{{- end }}
{{- end }}
{{- range list (list 10002 19999) (list 30000 31000) }}
{{- if and (le $port (last .)) (lt (first .) (add $port 64)) }}
{{- fail (printf "settings.telemetry.process_port (%d) and the 63 ports above it meet ports %d to %d, of Ray's workers or Serve's replicas: choose another, such as 9200" $port (first .) (last .)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
