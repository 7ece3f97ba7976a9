{{/* Parts of Ray's pods. KubeRay adds the command, Ray's address and, in the head, the autoscaler. */}}

{{- define "hermes.weightsClaim" -}}
{{- if .Values.weights.create -}}{{ include "hermes.fullname" . }}-weights{{- else -}}{{ .Values.weights.existingClaim }}{{- end -}}
{{- end }}

{{/* The directory of the hub's cache: on the volume of the weights if it is writable, so that pods share the files. */}}
{{- define "hermes.hubHome" -}}
{{- if and (include "hermes.weightsClaim" .) (not .Values.weights.readOnly) -}}
{{ .Values.weights.mountPath }}/.huggingface
{{- else -}}
/home/hermes/.cache/huggingface
{{- end -}}
{{- end }}

{{/* How large a pod's home may be. An engine's holds the model, too, if hub.access lets it download one and no volume takes it. */}}
{{- define "hermes.homeSize" -}}
{{- $ := .root -}}
{{- if and (eq .component "engine") (include "hermes.hubAccess" $) (hasPrefix "/home/hermes/" (include "hermes.hubHome" $)) -}}
{{ add (include "hermes.mebibytes" .group.homeSize) (include "hermes.mebibytes" $.Values.weights.size) }}Mi
{{- else -}}
{{ .group.homeSize }}
{{- end -}}
{{- end }}

{{/* Options of `ray start` for every pod.
     Requests do not pass through Ray's object store, so nearly all shared memory is left to tensor-parallel ranks.
     Without these two ports, a raylet waits until its agents have chosen some. They are Python, and slow to start on a busy
     node: the raylet gives up after 15 s, and `ray start` after 30. (KubeRay and Ray choose the agents' other two ports.) Linux
     gives no connection these two, which would end the agent and with it the raylet: they are below 32768. Ray's workers have
     those to 19999, and Serve's replicas those from 30000 on. */}}
{{- define "hermes.rayStartParams" -}}
object-store-memory: "268435456"
dashboard-agent-grpc-port: "25366"
runtime-env-agent-port: "25367"
{{- end }}

{{/* Variables that Ray Serve reads before it starts; serve_app/local/ray_cluster.py says why. Values in `env` override them. */}}
{{- define "hermes.fixedEnvironment" -}}
RAY_SERVE_ENABLE_HA_PROXY: "1"
RAY_SERVE_ENABLE_DIRECT_INGRESS: "1"
RAY_SERVE_THROUGHPUT_OPTIMIZED: "1"
RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE: "1"
# A reload of HAProxy disconnects streams after this time.
RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S: {{ include "hermes.longestSeconds" . | quote }}
RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S: {{ include "hermes.longestSeconds" . | quote }}
RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER: 1s
RAY_SERVE_HAPROXY_TUNE_BUFSIZE: "65536"
RAY_SERVE_HAPROXY_CONFIG_FILE_LOC: /run/haproxy/haproxy.cfg
RAY_SERVE_HAPROXY_SOCKET_PATH: /run/haproxy/admin.sock
RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH: /run/haproxy/metrics.sock
RAY_SERVE_HAPROXY_SERVER_STATE_BASE: /run/haproxy
RAY_SERVE_HAPROXY_SERVER_STATE_FILE: /run/haproxy/server-state
# How long a raylet waits for its agents once it has started; then it ends itself. The default of 30 s is too short where
# several pods start on one busy node.
RAY_agent_register_timeout_ms: "120000"
# Ray's logs: of each file this much and one older part are kept, in the volume `tmp`.
RAY_ROTATION_MAX_BYTES: "16777216"
RAY_ROTATION_BACKUP_COUNT: "1"
RAY_DEDUP_LOGS: "0"
RAY_USAGE_STATS_ENABLED: "0"
VLLM_NO_USAGE_STATS: "1"
HF_HOME: {{ include "hermes.hubHome" . }}
HF_HUB_OFFLINE: {{ empty (include "hermes.hubAccess" .) | ternary "1" "0" | quote }}
{{- end }}

{{/* Variables that differ from pod to pod. */}}
{{- define "hermes.ownEnvironment" -}}
{{- $ := .root -}}
{{- if eq .component "head" }}
RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S: "0" # no replica runs here, and Serve's controller never leaves
{{- if include "hermes.redisCa" $ }}
RAY_REDIS_CA_CERT: /etc/hermes/redis/ca.crt
{{- end }}
{{- else }}
RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S: {{ $.Values.drainSeconds | quote }}
{{- if $.Values.gcsFaultTolerance.enabled }}
# A head whose machine has died may take long to come back.
RAY_gcs_rpc_server_reconnect_timeout_s: "3600"
{{- end }}
{{- end }}
{{- if not .gpus }}
NVIDIA_VISIBLE_DEVICES: void # Ray counts every GPU that it sees, and some runtimes show all GPUs of the node
VLLM_TARGET_DEVICE: cpu # Serve validates the settings on the head, and vLLM cannot parse its arguments without a device
{{- end }}
{{- end }}

{{- define "hermes.rayEnvironment" -}}
{{- $own := include "hermes.ownEnvironment" . | fromYaml -}}
{{- $component := .component -}}
{{- with .root -}}
{{- include "hermes.redisUrl" . }}
{{- if and (eq $component "engine") .Values.hub.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.hub.existingSecret }}
      key: {{ .Values.hub.tokenKey }}
{{- end }}
{{- range $name, $value := merge (deepCopy (.Values.env | default dict)) $own (include "hermes.fixedEnvironment" . | fromYaml) }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The root file system is read-only, so everything is written to these mounts. Only engines mount weights, only ingresses API keys. */}}
{{- define "hermes.rayMounts" -}}
{{- $ := .root -}}
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/hermes
- name: haproxy
  mountPath: /run/haproxy
- name: shm
  mountPath: /dev/shm
{{- if and (eq .component "ingress") $.Values.auth.enabled }}
- name: keys
  mountPath: /etc/hermes/keys
  readOnly: true
{{- end }}
{{- if include "hermes.redisCa" $ }}
- name: redis-ca
  mountPath: /etc/hermes/redis
  readOnly: true
{{- end }}
{{- if and (eq .component "engine") (include "hermes.weightsClaim" $) }}
- name: weights
  mountPath: {{ $.Values.weights.mountPath }}
  readOnly: {{ $.Values.weights.readOnly }}
{{- end }}
{{- end }}

{{- define "hermes.rayVolumes" -}}
{{- $ := .root -}}
- name: tmp # Ray's session: its logs, sockets; engines compile here
  emptyDir:
    sizeLimit: {{ .group.tmpSize }}
- name: home # caches; and the model, if it is downloaded and has no volume
  emptyDir:
    sizeLimit: {{ include "hermes.homeSize" . }}
- name: haproxy # its configuration and sockets
  emptyDir:
    sizeLimit: 16Mi
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .group.shmSize }}
{{- if and (eq .component "ingress") $.Values.auth.enabled }}
- name: keys
  secret:
    secretName: {{ include "hermes.keysSecret" $ }}
    items:
      - key: {{ $.Values.auth.keysKey }}
        path: keys
{{- end }}
{{- if include "hermes.redisCa" $ }}
- name: redis-ca
  secret:
    secretName: {{ include "hermes.redisSecret" $ }}
    items:
      - key: {{ include "hermes.redisCa" $ }}
        path: ca.crt
{{- end }}
{{- if and (eq .component "engine") (include "hermes.weightsClaim" $) }}
- name: weights
  persistentVolumeClaim:
    claimName: {{ include "hermes.weightsClaim" $ }}
    readOnly: {{ $.Values.weights.readOnly }}
{{- end }}
{{- end }}

{{/* A container with its own probes gets none from KubeRay; KubeRay's probes need wget in the image. */}}
{{- define "hermes.rayletProbes" -}}
startupProbe:
  httpGet: {path: /api/local_raylet_healthz, port: agent}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /api/local_raylet_healthz, port: agent}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
{{- end }}

{{/* A worker pod, which has one container: (dict "root" $ "component" "engine" "group" .Values.engines "pods" "2-8" "gpus" 1) */}}
{{- define "hermes.workerTemplate" -}}
{{- /* KubeRay starts a new cluster when the pod template changes, but never when only a count changes. */}}
{{- $annotations := dict "hermes-serve/pods" (toString .pods) }}
{{- $spec := include "hermes.workerSpec" . }}
{{- include "hermes.pod" (merge (dict "id" 10001 "spec" $spec "places" (list .group) "annotations" $annotations) .) }}
{{- end }}

{{- define "hermes.workerSpec" -}}
{{- $ := .root -}}
serviceAccountName: {{ include "hermes.account" (list $ "") }}
terminationGracePeriodSeconds: {{ add $.Values.drainSeconds 30 }}
initContainers: # KubeRay adds another after it, which waits for the head
  {{- include "hermes.checkRedis" . | nindent 2 }}
containers:
  - name: ray-worker
    image: {{ include "hermes.rayImage" $ }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    env:
      {{- include "hermes.rayEnvironment" . | nindent 6 }}
    ports:
      - name: serve
        containerPort: 8000
      - name: metrics
        containerPort: 8080
      - name: agent
        containerPort: 52365
    {{- include "hermes.resources" (dict "root" $ "cpus" .group.cpus "memory" .group.memory "gpus" .gpus) | nindent 4 }}
    {{- include "hermes.rayletProbes" . | nindent 4 }}
    readinessProbe: # HAProxy runs and knows an ingress: the serve Service sends requests only to such pods
      httpGet: {path: /-/healthz, port: serve}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 1
    volumeMounts:
      {{- include "hermes.rayMounts" . | nindent 6 }}
volumes:
  {{- include "hermes.rayVolumes" . | nindent 2 }}
{{- end }}
